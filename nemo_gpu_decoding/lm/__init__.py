"""N-gram LMs: ARPA files, estimation from text, pruning, and packed LMs for large models on CPU and GPU."""
