"""Live streams: slots for utterances that come and go, when one has ended, and the server that reads many at once."""
