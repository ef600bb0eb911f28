"""Side-by-side benchmarks: verify that outputs agree, then time a strategy and its peers alternately.

`cases.py` is the table of what is measured, `run.py` the runner, `clock.py` the clock of CPU or GPU,
`sources.py` makes the tasks, `peers/` holds the peers. Records of real runs are in `docs/results`.
"""
