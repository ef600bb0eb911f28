"""An HTML page that compares transcripts of the same audio: `python -m tools.compare`, in a clone."""
