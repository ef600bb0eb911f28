"""cuda_wfst and paged_biglm: one search of word graphs on CPUs and GPUs."""
