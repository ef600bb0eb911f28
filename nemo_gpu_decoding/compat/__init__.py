"""Offer the interfaces of other decoders with the searches of this package, without NeMo."""
