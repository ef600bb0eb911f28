"""Distributes the utterances of a batch over threads.

The compiled searches release the GIL, so Python threads run them in parallel. numba's `prange` is no alternative: with
some threading layers it aborts the process when two threads decode at the same time, or after a fork.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch


def thread_count(threads: int) -> int:
    """Number of threads; 0 selects that of torch."""
    return threads if threads > 0 else torch.get_num_threads()


def for_each_share(work: Callable[[np.ndarray], None], costs: np.ndarray, threads: int) -> None:
    """Call `work(rows)` for disjoint sets of row numbers that cover all rows with a cost above 0.

    Rows are assigned in descending order of their costs, each to the thread with the least work. An exception in a
    share is raised after all shares have ended.
    """
    if len(costs) == 1 and costs[0] > 0:
        work(np.zeros(1, np.int64))
        return
    rows = np.argsort(-costs, kind="stable")
    rows = rows[costs[rows] > 0]
    threads = min(thread_count(threads), len(rows))
    if threads <= 1:
        if len(rows):
            work(np.sort(rows))
        return
    shares: list[list[int]] = [[] for _ in range(threads)]
    loads = np.zeros(threads)
    for row in rows:
        least = int(np.argmin(loads))
        shares[least].append(int(row))
        loads[least] += costs[row]
    futures = [_pool(os.getpid()).submit(work, np.array(share)) for share in shares[1:]]
    try:
        work(np.array(shares[0]))
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """The pool of this process. A forked child has no threads of its parent, so it creates its own pool."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="nemo-gpu-decoding")
