"""Beam searches and their common parts: interfaces of decoders and engines, results, candidate lists."""
