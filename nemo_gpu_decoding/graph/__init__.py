"""Word graphs, the search space of cuda_wfst and paged_biglm: building, loading and boosting."""
