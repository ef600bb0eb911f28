"""N-gram LMs: ARPA files, estimation from text, pruning, and packed large LMs for CPUs and GPUs."""
