"""Read, estimate, prune and pack n-gram LMs for CPUs and GPUs."""
