"""Which of NeMo's transducer decoders is measured beside ours, in what setting."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.peers.nemo_transducer import (
    NemoMAES,
    NemoMALSD,
    NemoTransducerBeam,
    NemoTransducerGreedy,
)
from nemo_gpu_decoding.bench.transducer.task import TDT

PEERS: dict[str, type[NemoTransducerBeam]] = {"alsd_pp": NemoMALSD, "aes_pp": NemoMAES}
# What the project promises (issue 4), for B=8, K=4..8, H=640, V=1024 on two threads.
TARGETS = {"alsd_pp": 3.0, "aes_pp": 5.0}
NO_TDT = "NeMo has no maes_batch for TDT"
ONE_FUSION = "NeMo's maes_batch ignores boosting beside an LM"


def make_transducer_cases(options: BenchOptions, kind: str) -> Iterator[Case]:
    """The rows of one kind of transducer, rnnt or tdt."""
    if "nemo" not in options.peers:
        return
    if options.strategy == "aes_pp" and kind == TDT:
        setting = next(settings(options))
        yield Case(PEERS["aes_pp"], setting, setting, Check.EQUAL, impossible=NO_TDT)
    else:
        yield from _beam_rows(options)
    greedy = Setting(0, threads=options.threads)
    # what a beam costs beside NeMo's greedy search, and what it mends with an LM
    ours = Setting(max(options.beams), True, 0, options.threads)
    yield Case(NemoTransducerGreedy, greedy, ours, Check.WER, None, _needs(ours))


def _beam_rows(options: BenchOptions) -> Iterator[Case]:
    peer, target = PEERS[options.strategy], TARGETS[options.strategy]
    for setting in settings(options):
        two = options.strategy == "aes_pp" and setting.lm and setting.phrases
        impossible = ONE_FUSION if two else None
        yield Case(peer, setting, setting, Check.EQUAL, target, _needs(setting), impossible)


def settings(options: BenchOptions) -> Iterator[Setting]:
    """All beam sizes without anything, with the LM, with LM and phrases, and with phrases where only
    these can be compared."""
    fused = [(False, 0), (True, 0)]
    if options.phrases:
        fused.append((True, options.phrases))
        if options.strategy == "aes_pp":
            fused.append((False, options.phrases))
    for lm, phrases in fused:
        for beam in options.beams:
            yield Setting(beam, lm, phrases, options.threads)


def _needs(setting: Setting) -> tuple[str, ...]:
    return ("lm",) * setting.lm + ("lexicon",) * bool(setting.phrases)
