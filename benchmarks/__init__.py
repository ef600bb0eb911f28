"""Side-by-side benchmarks: verify that outputs agree, then time a strategy and its peers alternately.

`python -m benchmarks`, from a clone. `cases.py` is the table of what is measured, `run.py` the runner, `clock.py` the
clock of CPU or GPU, `sources.py` makes the tasks, `peers/` holds the peers. Two further programs: `live_load.py` puts
a live server under load, `cluster_scale.py` simulates a cluster of up to 1,000 workers. Records of real runs are in
`docs/results`.
"""
