"""`Engine` is the interface between a decoder and the search on one backend, for the streams of one `open`.

A decoder checks arguments and builds results; its engines search. An engine holds the state of its streams, so only
one thread may use it at a time. `Streams` are the utterances that a decoder is decoding. This file also chooses the
backend, and divides the work of a CPU search among threads.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.boosting import BoostingTree
from nemo_gpu_decoding.fusion.fusion import Request


class Engine(ABC):
    """The search of n utterances, which runs on one backend."""

    def accepts_device_lengths(self, lengths: torch.Tensor) -> bool:
        """Return whether `push` accepts these lengths as a tensor and checks them on its device."""
        return False

    @abstractmethod
    def push(self, inputs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        """Read lengths[b] frames of inputs[b].

        Args:
            inputs: [n, T, ...] floating point, on any device.
            lengths: [n] int64 in 0 .. T, or a tensor that `accepts_device_lengths` accepts.
            deferred: `results` may raise the errors instead; the streams are then lost.

        Raises:
            BadRow: the search cannot read a valid frame; the streams are unchanged.
            ValueError: a length in a tensor is out of range; the streams are unchanged.
            StreamsLost: the streams cannot continue.
        """

    @abstractmethod
    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Any:
        """Return the best hypotheses, in the form that the decoder class reads. The streams are unchanged.

        Args:
            rows: numbers of the utterances.
            n_best: number of hypotheses per utterance.
            final: add final weights, because these utterances have ended.

        Raises:
            ValueError: `push` deferred an error.
            StreamsLost: the streams cannot continue.
        """

    def commit(self, rows: Sequence[int]) -> None:  # noqa: B027 (engines without back-pointers have nothing to do)
        """Commit the tokens that all live hypotheses of a stream share, for each of the different `rows`.

        Later results trace back only the tokens that are not committed. Commits do not change results.
        """

    @abstractmethod
    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        """Replace the utterances of the given streams by new ones; all other streams continue.

        Args:
            rows: numbers of utterances.
            fusion: the fusion of all n utterances after the call; it differs for `rows` only.

        Raises:
            ValueError: a captured CUDA graph depends on tables that would change; the streams are unchanged.
        """


class BadRow(ValueError):  # noqa: N818 (the name describes the event)
    """An error: a frame cannot be read; the streams are unchanged.

    Args:
        row: number of the stream.
        message: names the frame, the value seen and the value expected.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class StreamsLost(ValueError):  # noqa: N818 (the name describes the event)
    """An error: the streams of an engine cannot continue; the decoder closes them."""


# ------------------------------------------------------------------------------ streams of a decoder


logger = logging.getLogger("nemo_gpu_decoding")


@dataclass
class Streams:
    """The state of n utterances that are being decoded. Only one thread at a time may use a `Streams` object."""

    fusion: BatchFusion  # LM, boosting tree and weights of each
    capacity: int  # frames to allocate buffers for
    is_open: np.ndarray  # [n] bool
    engine: Engine | None = None  # created by the first push, on the backend for its inputs
    commit_frames: dict[int, int] = field(default_factory=dict)  # of streams that have committed: at the last commit
    # Of utterances whose phrases need evidence, by their numbers. A copy of these streams keeps its own values.
    requests: dict[int, Request] = field(default_factory=dict)
    heard: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # all inputs
    shown: dict[int, int] = field(default_factory=dict)  # committed tokens of partial results

    def __len__(self) -> int:
        return len(self.fusion)

    @property
    def closed(self) -> bool:
        """Return whether the object has streams and all streams are closed."""
        return len(self) > 0 and not self.is_open.any()

    def set_open(self, rows: Sequence[int], is_open: bool) -> None:
        """Mark streams as open or closed. The marks of copies of this object do not change."""
        self.is_open = self.is_open.copy()
        self.is_open[list(rows)] = is_open

    def tree_of(self, row: int) -> BoostingTree | None:
        """Return an utterance's boosting tree, or None if there is none or it does not name its phrases."""
        fusion = self.fusion
        tree = fusion.trees[fusion.tree_of[row]] if fusion.boosting_weights[row] else None
        return tree if isinstance(tree, BoostingTree) else None

    def remember(self, rows: Sequence[int], requests: Sequence[Request | None] | None) -> None:
        """Store the requests, and later the inputs, of new utterances whose phrases need evidence (`evidence.py`)."""
        checks = any(isinstance(tree, BoostingTree) and tree.ac_threshold > 0 for tree in self.fusion.trees)
        if not checks and not self.requests:
            return
        kept = [i for i, row in enumerate(rows) if (tree := self.tree_of(row)) and tree.ac_threshold > 0]
        left = self.requests.keys() - set(rows)
        self.requests = {row: self.requests[row] for row in left} | {
            rows[i]: (requests and requests[i]) or Request() for i in kept
        }
        self.heard = {row: self.heard.get(row, ()) if row in left else () for row in self.requests}
        self.shown = {row: self.shown.get(row, 0) if row in left else 0 for row in self.requests}

    def hear(self, inputs: Tensor, counts: Sequence[int], *, copies: bool) -> None:
        """Store the inputs that were read: copies of them if the caller may change them later (`copies`)."""
        heard = dict(self.heard)
        for row in heard:
            if counts[row] > 0:
                new = inputs[row, : counts[row]]
                heard[row] += (new.clone() if copies else new,)
        self.heard = heard


# ----------------------------------------------------------------------------------------- backend

Obstacle = Callable[[torch.device], "str | None"]


def choose_backend(wanted: str, device: torch.device, obstacle: Obstacle) -> Literal["cuda", "cpu"]:
    """Return the backend for tensors on `device`.

    Args:
        wanted: "cuda"; "cpu"; or "auto", which is cuda for tensors on a GPU if kernels run there.
        device: device of the tensors to decode. With "cuda", tensors on the CPU are copied.
        obstacle: returns why the decoder's kernels cannot use a device that can run other kernels, or None.

    Raises:
        ValueError: `wanted` is "cuda" and the kernels cannot run; the message gives the reason.
    """
    if wanted == "cpu" or (wanted == "auto" and device.type != "cuda"):
        _say_once("backend cpu for tensors on %s (option backend=%s)", device, wanted)
        return "cpu"
    gpu = runtime().device_for(device)
    why_not = runtime().why_not(gpu) or obstacle(gpu)
    if why_not is None:
        _say_once("backend cuda for tensors on %s (option backend=%s)", device, wanted)
        return "cuda"
    if wanted == "cuda":
        raise ValueError(f"backend is 'cuda' for tensors on {device}, expected 'cpu' or 'auto': {why_not}")
    _say_once("backend cpu for tensors on %s, which are copied to the host: %s", device, why_not)
    return "cpu"


@lru_cache(maxsize=32)
def _say_once(message: str, *given: Any) -> None:
    logger.info(message, *given)


# ----------------------------------------------------------------------------------------- threads
#
# The compiled searches release the GIL, so Python threads run them in parallel. numba's `prange` is no alternative:
# with some threading layers it aborts the process when two threads decode at the same time, or after a fork.


def thread_count(threads: int) -> int:
    """Return the number of threads; 0 selects that of torch."""
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
        wait(futures)
    for future in futures:
        future.result()


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the pool of this process. A forked child has no threads of its parent, so it creates a new pool."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="nemo-gpu-decoding")
