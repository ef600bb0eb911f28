"""Lattices of word-graph searches: link pruning, n-best texts, determinisation, rescoring."""
