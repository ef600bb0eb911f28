"""N live streams that are heard by one decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.bench.measure import ratio_clock
from nemo_gpu_decoding.bench.task import Utterances
from nemo_gpu_decoding.search.protocol import Decoder
from nemo_gpu_decoding.search.result import NBest

CHECKED_AT_ONCE = 16  # streams


class Tape:
    """The utterances of a task, one after the other, without end. Stream i begins with utterance i."""

    def __init__(self, task: Utterances) -> None:
        lengths = task.lengths.tolist()
        self._frames = torch.cat([row[:n] for row, n in zip(task.inputs, lengths, strict=True)])
        self._begin = np.append(0, np.cumsum(lengths)[:-1])

    @property
    def width(self) -> int:
        return self._frames.shape[1]

    @property
    def device(self) -> torch.device:
        return self._frames.device

    def read(self, stream: int, first: int, count: int) -> torch.Tensor:
        """[count, width] frames of a stream, from its frame `first` on."""
        begin = int(self._begin[stream % len(self._begin)]) + first
        return self._frames[torch.arange(begin, begin + count) % len(self._frames)]


class Replay:
    """One decoder with `n` open streams that hear a tape, `chunk` frames at a time.

    Args:
        tape: on the device where decoders get their log-probs.
        texts: none, own or all; see `BenchOptions.texts`. With "own" every stream is a group of its own,
            unless the decoder can be asked about single ones; else all are one group, opened and pushed
            together.
        threads: those of the decoder; on a CPU they decide on the clock.
        tells_rows: the decoder can be asked about single streams of a group.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        tape: Tape,
        n: int,
        chunk: int,
        *,
        texts: str,
        threads: int,
        tells_rows: bool = False,
    ) -> None:
        self._decoder, self._tape = decoder, tape
        self._partial: Callable[..., object] = decoder.partial
        self._asks, self._asks_rows = texts != "none", texts == "own" and tells_rows
        self._size = 1 if texts == "own" and not tells_rows else n  # of a group
        self._groups = [decoder.open(self._size) for _ in range(n // self._size)]
        # where an encoder would put its output
        self._inputs = torch.zeros(n, chunk, tape.width, device=tape.device)
        self._lengths = torch.zeros(n, dtype=torch.int64)
        self._heard = np.zeros(n, np.int64)  # frames
        self._clock = stream_clock(threads, tape.device)

    def serve(self, streams: Sequence[int]) -> float:
        """Decode the next chunk of these streams, together; the seconds that it took.

        Only the decoder is timed. The other streams of a group have length 0.
        """
        chunk = self._inputs.shape[1]
        self._lengths.zero_()
        for stream in streams:
            self._inputs[stream] = self._tape.read(stream, int(self._heard[stream]), chunk)
            self._lengths[stream] = chunk
            self._heard[stream] += chunk
        begin = self._clock()
        for group in sorted({stream // self._size for stream in streams}):
            rows = slice(group * self._size, (group + 1) * self._size)
            self._decoder.push(self._groups[group], self._inputs[rows], self._lengths[rows])
            if self._asks_rows:
                self._partial(self._groups[group], rows=streams)
            elif self._asks:
                self._partial(self._groups[group])
        return self._clock() - begin

    def close(self) -> list[NBest]:
        """End all streams; their results."""
        return [result for group in self._groups for result in self._decoder.close(group)]

    def in_one_piece(self) -> Iterator[NBest]:
        """What the decoder makes of the same audio when it gets all of it at once."""
        for first in range(0, len(self._heard), CHECKED_AT_ONCE):
            heard = self._heard[first : first + CHECKED_AT_ONCE]
            inputs = torch.zeros(
                len(heard), int(heard.max()), self._tape.width, device=self._tape.device
            )
            for row, count in enumerate(heard.tolist()):
                inputs[row, :count] = self._tape.read(first + row, 0, count)
            yield from self._decoder.decode(inputs, heard.tolist())


def stream_clock(threads: int, device: torch.device) -> Callable[[], float]:
    """Seconds: of the CPU for one thread of it, else of the wall once the GPU is idle."""
    if device.type != "cuda":
        return time.process_time if ratio_clock(threads) == "cpu" else time.perf_counter

    def idle_at() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return idle_at


def equal_results(replay: Replay) -> tuple[bool, str]:
    """(whether every stream gave the result of its audio in one piece, what was seen). Closes them."""
    pairs = zip(replay.close(), replay.in_one_piece(), strict=True)
    equal = [
        ours.best.tokens.tolist() == whole.best.tokens.tolist() and ours.best.score == whole.best.score
        for ours, whole in pairs
    ]
    return all(equal), f"equal to decoding in one piece: {sum(equal)} of {len(equal)} streams"
