"""`bench mode=stream`: the latency of live streams that share one decoder."""
