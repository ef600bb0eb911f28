"""Side-by-side benchmarks: verify that outputs agree, then time a strategy and its peers alternately.

Start with `run.py`; `peers/` holds one file per peer, `results/` the records of real runs.
"""
