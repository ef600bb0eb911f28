"""Beam searches and their common parts: the interface of decoders and engines, results, candidate lists."""
