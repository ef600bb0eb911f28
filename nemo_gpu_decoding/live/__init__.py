"""Live streams: when an utterance has ended."""
