"""paged_biglm: word-graph search with a large LM on the fly [LET], [XLLM]. Read `cpu.py` first."""
