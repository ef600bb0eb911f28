"""Contain the beam searches and what they share: interfaces of decoders and engines, results, candidate lists."""
