"""Live streams: places for utterances that come and go, and when an utterance has ended."""
