"""Process lattices of word-graph searches: link pruning, n-best texts, determinisation, rescoring."""
