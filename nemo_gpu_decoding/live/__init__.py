"""Decode live audio streams: slots for running utterances, endpointing, and the WebSocket server."""
