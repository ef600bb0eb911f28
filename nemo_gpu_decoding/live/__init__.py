"""Decode live streams: slots for utterances, endpointing, and the WebSocket server."""
