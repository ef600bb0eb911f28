"""Side-by-side benchmarks: verify that outputs agree, then time a strategy and its peers alternately.

Start with `run.py`; `peers/` holds one file per peer. Records of real runs are in `docs/results`.
"""
