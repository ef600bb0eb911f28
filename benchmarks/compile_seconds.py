"""CPU seconds that the first decoding of each strategy takes with an empty cache of compiled code, and later calls.

    python -m benchmarks.compile_seconds              # all strategies
    python -m benchmarks.compile_seconds cuda_wfst

Each strategy decodes two utterances of `assets/hard_speech` with an LM, in a separate process with an empty cache. The
compilation of the code that reads LMs and graphs is a separate column. The last column has the microseconds of a
later call with one frame of one utterance, which hardly has anything to search.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import timeit
from itertools import pairwise

from nemo_gpu_decoding.jit import CACHE_VARIABLE, compilation

STRATEGIES = ("flexctc_beam", "alsd_pp", "aes_pp", "cuda_wfst", "paged_biglm")
CALLS = 2000  # of which the fastest counts


def measure(strategy: str) -> str:
    """One row: seconds of the decoder's construction and first call, functions; microseconds of later calls."""
    from benchmarks.options import GRAPH_STRATEGIES, BenchOptions
    from benchmarks.ours import OURS
    from benchmarks.peers.base import Setting
    from benchmarks.sources import make_tasks

    options = BenchOptions(strategy=strategy, tasks=["hard"], threads=1)
    task = make_tasks(options)[0]
    beam = task.weights.graph_beams[0] if strategy in GRAPH_STRATEGIES else 8
    marks = [(time.process_time(), compilation.count)]
    decoder = OURS[strategy](options, task, Setting(beam, True, threads=1)).decoder
    marks.append((time.process_time(), compilation.count))
    decoder.decode(task.inputs[:2], task.lengths[:2])
    marks.append((time.process_time(), compilation.count))
    later = min(timeit.repeat(lambda: decoder.decode(task.inputs[:1, :1], [1]), number=1, repeat=CALLS))
    columns = [f"{b[0] - a[0]:6.1f} s {b[1] - a[1]:5d}" for a, b in pairwise(marks)]
    return f"{strategy:14}" + "".join(columns) + f"{1e6 * later:8.0f} us"


def main() -> int:
    """Start a process for each strategy; print the table to stdout."""
    if sys.argv[1:2] == ["--row"]:
        print(measure(sys.argv[2]))
        return 0
    print(f"{'':14}{'LM and graph, functions':>16}{'first call, functions':>23}{'later':>11}")
    for strategy in sys.argv[1:] or STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, CACHE_VARIABLE: folder, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.compile_seconds", "--row", strategy]
            row = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
        print(row.stdout, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
