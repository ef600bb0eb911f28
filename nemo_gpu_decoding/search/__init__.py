"""Beam searches, and their common modules: interfaces of decoders and engines, results, candidate lists."""
