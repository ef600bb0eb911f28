"""Lattices of word graphs: what is made of the links of a search, from pruned links to alternative texts."""
