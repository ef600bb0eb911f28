"""Detours: words of hypotheses that a beam search dropped, in place of words of its best path.

A beam holds few hypotheses, and at the end of an utterance most of them differ in its last words. Hypotheses that
differ in earlier words were in the beam before. So the search runs a second time, with a wider beam, and is read every
few frames. Each hypothesis of such a time, less its last word, which may be incomplete, continues with the best path's
words from the start of that word.
The cost of its words is the difference of scores to the best hypothesis of the last time at which they were read. At
the end of the utterance these are the n-best list and its scores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.timed_words import TimedWord, timed_words
from nemo_gpu_decoding.vocabulary import Vocabulary

if TYPE_CHECKING:
    from nemo_gpu_decoding.fusion.fusion import Request
    from nemo_gpu_decoding.search.decoder import Decoder

READ_EVERY = 4  # frames
WIDER = 2  # times the beam


class Detour(NamedTuple):
    """Words in place of the words begin .. end - 1 of the best path; end > begin."""

    begin: int
    end: int
    words: tuple[TimedWord, ...]
    cost: float  # natural log, relative to the best path


def wider(decoder: Decoder[Any, Any], device: torch.device) -> Decoder[Any, Any]:
    """The same search with a wider beam, or the decoder itself if no such beam is possible on this device."""
    config = decoder.config
    backend = "cuda" if config.backend == "auto" and device.type == "cuda" else config.backend
    try:
        config = replace(config, beam_size=WIDER * config.beam_size, backend=backend)
        wide = decoder.with_options(config, decoder.fusion)
        wide.open(1, device=device)
    except ValueError:  # beyond the largest beam, or the kernels need more memory than the GPU has
        return decoder
    return wide


def find_detours(
    decoder: Decoder[Any, Any],
    inputs: Tensor,
    lengths: Sequence[int],
    requests: Sequence[Request | None] | None,
    results: Sequence[NBest[Path]],
    vocabulary: Vocabulary,
) -> list[list[Detour]]:
    """The detours of each utterance.

    Args:
        decoder: of the second search, see `wider`; it has a `beam_size`.
        inputs, lengths, requests: of the search with these `results`.
    """
    readers = [_Reader(nbest.best, vocabulary) for nbest in results]
    for read in _read(decoder, inputs, lengths, requests):
        for reader, nbest in zip(readers, read, strict=True):
            if nbest.num_frames > reader.frames:
                reader.add(nbest, max(path.score for path in nbest), ended=False)
    for reader, nbest in zip(readers, results, strict=True):
        reader.add(nbest, nbest.best.score, ended=True)
    return [reader.detours for reader in readers]


def _read(
    decoder: Decoder[Any, Any], inputs: Tensor, lengths: Sequence[int], requests: Sequence[Request | None] | None
) -> Iterator[list[NBest[Path]]]:
    """The hypotheses of all utterances, every few frames."""
    streams = decoder.open(len(inputs), requests, capacity=max(lengths, default=0))
    for begin in range(0, max(lengths, default=0), READ_EVERY):
        counts = [min(max(length - begin, 0), READ_EVERY) for length in lengths]
        decoder.push(streams, inputs[:, begin : begin + READ_EVERY], counts)
        yield decoder.partial(streams, decoder.config.beam_size)


class _Reader:
    """Detours around the best path of an utterance."""

    def __init__(self, best: Path, vocabulary: Vocabulary) -> None:
        self.best, self.vocabulary = best, vocabulary
        self.words = timed_words(best, vocabulary)
        self.spans = vocabulary.words(best.tokens.tolist())
        self.ends = [span.end_token for span in self.spans]
        self.middles = [(word.start + word.end) / 2 for word in self.words]
        self.frames = 0  # read so far
        self._found: dict[tuple[Any, ...], Detour] = {}  # by fields other than times and cost

    @property
    def detours(self) -> list[Detour]:
        return list(self._found.values())

    def add(self, nbest: NBest[Path], best_score: float, *, ended: bool) -> None:
        """Add the detours of the hypotheses at a time; their costs replace those of earlier times."""
        self.frames = nbest.num_frames
        new: dict[tuple[Any, ...], Detour] = {}
        for path in nbest:
            begin, end, words = self._differing(path, ended)
            key = begin, end, tuple(word.text for word in words)
            cost = best_score - path.score
            if end > begin and (key not in new or cost < new[key].cost):
                new[key] = Detour(begin, end, tuple(words), cost)
        self._found.update(new)

    def _differing(self, path: Path, ended: bool) -> tuple[int, int, list[TimedWord]]:
        """Begin, end and words of a hypothesis's detour; (0, 0, []) without one."""
        count = min(len(self.best), len(path))
        differs = np.flatnonzero(self.best.tokens[:count] != path.tokens[:count])
        # the last shared word may continue with the next token
        begin = max(0, bisect_right(self.ends, differs[0] if len(differs) else count) - 1)
        own = timed_words(path.after(self.spans[begin].first_token) if begin else path, self.vocabulary)
        end = len(self.words)
        if not ended:
            end = max(begin, bisect_right(self.middles, own[-1].start)) if own else begin
            own = own[:-1]
        while own and begin < end and own[0].text == self.words[begin].text:
            own, begin = own[1:], begin + 1
        while own and begin < end and own[-1].text == self.words[end - 1].text:
            own, end = own[:-1], end - 1
        if own and begin == end:  # inserted: a neighbour belongs to the detour
            if end < len(self.words):
                own.append(self.words[end])
            elif begin:
                begin -= 1
                own.insert(0, self.words[begin])
            end = begin + 1
        return (begin, end, own) if end > begin else (0, 0, [])


def lattice_of(
    best: Sequence[TimedWord], detours: Sequence[Detour], ids: dict[str, int]
) -> tuple[list[tuple[Any, ...]], int]:
    """Arcs (source, target, id of the word, cost, first frame, end frame) by source, and the number of states.

    The best path is a chain of states 0, ..., and each detour is another chain between two of them.
    """
    nothing = TimedWord("", 0, 0)
    rows = [((n, 0, 0), (n + 1, 0, 0), word, 0.0) for n, word in enumerate(best or [nothing])]
    for number, detour in enumerate(detours, 1):
        words, source = detour.words or (nothing,), (detour.begin, 0, 0)
        for n, word in enumerate(words, 1):
            target = (detour.begin, number, n) if n < len(words) else (detour.end, 0, 0)
            rows.append((source, target, word, detour.cost if n == 1 else 0.0))
            source = target
    states = {state: n for n, state in enumerate(sorted({state for row in rows for state in row[:2]}))}
    arcs = [
        (states[source], states[target], ids[word.text], cost, word.start, word.end)
        for source, target, word, cost in rows
    ]
    return sorted(arcs, key=lambda arc: arc[0]), len(states)
