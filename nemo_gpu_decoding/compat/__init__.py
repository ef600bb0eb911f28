"""Interfaces of other decoders on the searches of this package; it imports no NeMo."""
