"""Which decoder is measured beside which, in what setting, and what we hold ourselves to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Peer, Setting
from nemo_gpu_decoding.bench.peers.flashlight import Flashlight
from nemo_gpu_decoding.bench.peers.nemo import NemoBeam, NemoGreedy
from nemo_gpu_decoding.bench.peers.pyctcdecode import PyCTCDecode

FEW_PHRASES = 10


class Check(Enum):
    """How a row is verified before it is timed (see `verify.py`)."""

    EQUAL = "equal hypotheses"
    WER = "WER ours <= WER peer"
    SAME_WER = "WER ours about WER peer"  # of a peer that searches the same graph
    SCORES = "scores recomputed"
    WORDS = "equal words and costs"


@dataclass(frozen=True)
class Case:
    """One row to be: a peer, its setting and ours.

    `target` is the least ratio peer / ours that the project promises (issue 2), on 80 ms frames, V=1024.
    """

    peer: type[Peer] | None  # None: the strategy itself, in another setting
    theirs: Setting
    ours: Setting
    check: Check
    target: float | None = None
    needs: tuple[str, ...] = ()  # fields of `Task` that must be there
    impossible: str | None = None  # why the peer cannot do this at all


def make_cases(options: BenchOptions) -> Iterator[Case]:
    """All rows of a run, in the order in which they are measured and printed."""
    for family in options.peers:
        if family in _FAMILIES:
            yield from _FAMILIES[family](options)
    if options.many_phrases:
        few = Setting(max(options.beams), True, FEW_PHRASES, options.threads)
        many = Setting(max(options.beams), True, options.many_phrases, options.threads)
        yield Case(None, few, many, Check.SCORES, 1 / 1.3, ("lm", "lexicon"))


def _nemo(options: BenchOptions) -> Iterator[Case]:
    threads = options.threads
    for beam in options.beams:
        setting = Setting(beam, threads=threads)
        yield Case(NemoBeam, setting, setting, Check.EQUAL, 25.0)
    for beam in options.beams:
        setting = Setting(beam, lm=True, threads=threads)
        yield Case(NemoBeam, setting, setting, Check.EQUAL, 200.0, ("lm",))
    if options.phrases:
        for beam in options.beams:
            setting = Setting(beam, True, options.phrases, threads)
            yield Case(NemoBeam, setting, setting, Check.EQUAL, None, ("lm", "lexicon"))
    greedy = Setting(0, threads=threads)
    # "no more CPU time than a few greedy passes": at most four
    yield Case(
        NemoGreedy, greedy, Setting(max(options.beams), True, 0, threads), Check.WER, 0.25, ("lm",)
    )


def _flashlight(options: BenchOptions) -> Iterator[Case]:
    for beam in options.beams:
        setting = Setting(beam, lm=True, threads=options.threads)
        yield Case(Flashlight, setting, setting, Check.WER, 15.0 if beam >= 16 else 8.0, ("lm",))


def _pyctcdecode(options: BenchOptions) -> Iterator[Case]:
    for beam in options.beams:
        setting = Setting(beam, lm=True, threads=options.threads)
        yield Case(PyCTCDecode, setting, setting, Check.WER, 15.0, ("lm", "word_lm"))
    if options.phrases:
        for beam in options.beams:
            setting = Setting(beam, True, options.phrases, options.threads)
            yield Case(PyCTCDecode, setting, setting, Check.WER, 200.0, ("lm", "word_lm", "lexicon"))


_FAMILIES = {"nemo": _nemo, "flashlight": _flashlight, "pyctcdecode": _pyctcdecode}
