"""Build, load and boost word graphs, the search space of cuda_wfst and paged_biglm."""
