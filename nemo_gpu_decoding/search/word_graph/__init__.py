"""Search word graphs on CPUs and GPUs, with one search for cuda_wfst and paged_biglm."""
