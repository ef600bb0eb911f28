"""Offer the interfaces of pyctcdecode, ONNX exports and transformers with this package's searches, without NeMo."""
