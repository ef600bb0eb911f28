"""Transcripts of the same audio side by side, as one HTML page: `python -m tools.compare`, from a clone."""
