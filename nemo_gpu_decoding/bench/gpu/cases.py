"""What is measured on a GPU: which batch, decoded by whom, with an encoder before it or without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Peer, Setting
from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder
from nemo_gpu_decoding.bench.peers.nemo import NemoBeam, NemoGreedy
from nemo_gpu_decoding.bench.peers.riva import RivaDecoder
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting
from nemo_gpu_decoding.bench.word_graph.strategies import WORD_GRAPH_STRATEGIES

# What the project promises (issue 3), for B=32, K=16, LM and phrases: 20 times as fast as NeMo's beam
# with CUDA graphs; with an encoder before it, 1 % slower than greedy at most.
PROMISED_FOR = (32, 16)
DECODER_TARGET = 20.0
END_TO_END_TARGET = 1 / 1.01

# And for word graphs (issue 5), for B=128 and 10,000 hypotheses per frame: 5 times as fast as Riva's.
WORD_GRAPH_BATCH, WORD_GRAPH_ACTIVE = 128, 10_000
RIVA_TARGET = 5.0

DECODER, END_TO_END = "decoder", "end to end"


@dataclass(frozen=True)
class GPUCase:
    """One row to be."""

    part: str  # DECODER, or END_TO_END: encoder and decoder
    batch: int  # B
    case: Case


def make_gpu_cases(options: BenchOptions) -> Iterator[GPUCase]:
    """All rows of a run. Those of a batch size follow each other, for they share their decoders."""
    if options.strategy in WORD_GRAPH_STRATEGIES:
        yield from _word_graph_rows(options)
        return
    if "nemo" not in options.peers:
        return
    parts = (DECODER, END_TO_END) if options.end_to_end else (DECODER,)
    for batch in options.batches:
        for part in parts:
            yield from _beam_rows(options, part, batch)
            yield from _greedy_rows(options, part, batch)


def _beam_rows(options: BenchOptions, part: str, batch: int) -> Iterator[GPUCase]:
    """Ours beside `beam_batch`, each with and without LM and phrases."""
    for setting in _settings(options):
        promised = part == DECODER and (batch, setting.beam_size) == PROMISED_FOR and setting.phrases
        target = DECODER_TARGET if promised else None
        yield GPUCase(
            part, batch, Case(NemoBeam, setting, setting, Check.EQUAL, target, _needs(setting))
        )


def _greedy_rows(options: BenchOptions, part: str, batch: int) -> Iterator[GPUCase]:
    """What a beam costs beside `greedy_batch`, which has neither LM nor phrases."""
    greedy = Setting(0, threads=options.threads)
    for setting in _settings(options):
        promised = part == END_TO_END and (batch, setting.beam_size) == PROMISED_FOR and setting.phrases
        target = END_TO_END_TARGET if promised else None
        # not by word errors: without LM and phrases a beam may err now and then where greedy does not
        case = Case(NemoGreedy, greedy, setting, Check.SCORES, target, _needs(setting))
        yield GPUCase(part, batch, case)


def _word_graph_rows(options: BenchOptions) -> Iterator[GPUCase]:
    """Ours beside Riva's and Kaldi's, which is on the CPU; behind an encoder beside `greedy_batch`."""
    beside: dict[str, tuple[type[Peer], Check]] = {
        "riva": (RivaDecoder, Check.SAME_WER), "kaldi_decoder": (KaldiDecoder, Check.WORDS),
    }  # fmt: skip
    greedy = Setting(0, threads=options.threads)
    for batch in options.batches:
        promised = (batch, options.max_active) == (WORD_GRAPH_BATCH, WORD_GRAPH_ACTIVE)
        for family, (peer, check) in beside.items():
            if family not in options.peers:
                continue
            target = RIVA_TARGET if promised and family == "riva" else None
            for beam in options.graph_beams:
                own = graph_setting(options, beam)
                yield GPUCase(DECODER, batch, Case(peer, own, own, check, target, ("word_lm",)))
        if options.end_to_end and "nemo" in options.peers:
            for beam in options.graph_beams:
                own = graph_setting(options, beam)
                case = Case(NemoGreedy, greedy, own, Check.WER, None, ("word_lm",))
                yield GPUCase(END_TO_END, batch, case)


def _settings(options: BenchOptions) -> Iterator[Setting]:
    for fused in (False, True):
        for beam in options.beams:
            yield Setting(beam, fused, options.phrases if fused else 0, options.threads)


def _needs(setting: Setting) -> tuple[str, ...]:
    return ("lm", "lexicon") if setting.phrases else ("lm",) if setting.lm else ()
