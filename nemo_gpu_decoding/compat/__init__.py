"""Interfaces of other decoders, implemented with the searches of this package, without NeMo."""
