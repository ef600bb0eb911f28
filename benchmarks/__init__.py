"""Benchmarks: check that the outputs of a strategy and its peers agree, then time them alternately.

Run `python -m benchmarks` in a clone. `cases.py` is the table of measurements, `run.py` the runner, `clock.py`
measures time on CPU or GPU, `sources.py` creates the tasks, `peers/` holds the peers.

Further programs: `live_load.py` is a load test of the live server, `cluster_scale.py` simulates a cluster of up to
1,000 workers, `compile_seconds.py` measures the compilation of the CPU path.
`docs/results` has results of real runs.
"""
