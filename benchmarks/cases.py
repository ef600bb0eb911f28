"""The table of all rows: pairs of a strategy and a peer, as data."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from benchmarks.options import GRAPH_STRATEGIES, TRANSDUCER_STRATEGIES, BenchOptions
from benchmarks.ours import (
    BOUNDED_EAGER,
    COMPACT,
    EAGER,
    EAGER_GROUPS,
    LARGE_LM,
    LET,
    MINIMAL,
    NORMAL,
    ON_CPU,
    ONE_THREAD,
    SMALL_LM,
    TWO_PASS,
)
from benchmarks.peers.base import Peer, Setting
from benchmarks.peers.nemo import (
    ALSD_UNBATCHED,
    BEAM_BATCH,
    GREEDY,
    GREEDY_BATCH,
    GREEDY_FUSION,
    GREEDY_FUSION_CTC,
    MAES,
    MAES_UNBATCHED,
    MALSD,
)
from benchmarks.peers.text import FLASHLIGHT, FLASHLIGHT_WORDS, PYCTCDECODE
from benchmarks.peers.word_graphs import KALDI_DECODER, RIVA
from benchmarks.tasks import Task

FEW_PHRASES = 10
# models of both sides besides the log-probs: (LM, phrases)
PLAIN, LM, PHRASES, BOTH = (False, False), (True, False), (False, True), (True, True)
DECODER, END_TO_END = "decoder", "end to end"
NO_TDT = "NeMo has no maes_batch for TDT"
NO_TDT_UNBATCHED = "NeMo has no alsd for TDT"
ONE_FUSION = "NeMo's maes_batch ignores boosting beside an LM"


class Check(Enum):
    """Check of a row before it is timed, see `verify.py`."""

    EQUAL = "equal hypotheses and scores"  # as the peer gives them for utterances alone
    WORDS = "equal words and costs"  # or better ones
    COSTS = "equal costs"  # nearly always, or better ones
    SCORES = "scores recomputed"
    LM = "LM scores"  # of the large LM, asked word by word
    GROUPS = "LM scores; costs beside the default limit of groups"  # which may be better
    WER = "WER ours <= WER peer"
    ABOUT = "WER ours about WER peer"  # of a peer that searches the same
    ALONE = "equal to utterances alone"  # ours, to the bit; where the peer has other results


class Line(NamedTuple):
    """A strategy beside a peer; it gives rows for every beam and combination of models."""

    strategy: str
    family: str  # what `peers` calls the peer; "" for our strategy itself
    peer: Peer | None
    check: Check
    devices: tuple[str, ...] = ("cpu", "cuda")
    added: tuple[tuple[bool, bool], ...] = (LM,)
    parts: tuple[str, ...] = (DECODER,)
    greedy: bool = False  # the peer has neither beam nor LM nor phrases
    fused: bool = False  # the peer has no beam, but the LM and the phrases of the strategy


CPU, GPU, ANYWHERE = ("cpu",), ("cuda",), (DECODER, END_TO_END)
EVERY = (PLAIN, LM, PHRASES, BOTH)
TABLE = (
    Line("flexctc_beam", "nemo", BEAM_BATCH, Check.EQUAL, CPU, (PLAIN, LM, BOTH)),
    Line("flexctc_beam", "nemo", BEAM_BATCH, Check.EQUAL, GPU, (PLAIN, BOTH), ANYWHERE),
    Line("flexctc_beam", "nemo", GREEDY_BATCH, Check.SCORES, CPU, greedy=True),
    Line("flexctc_beam", "nemo", GREEDY_BATCH, Check.SCORES, GPU, (PLAIN, BOTH), ANYWHERE, greedy=True),
    Line("flexctc_beam", "greedy_fusion", GREEDY_FUSION_CTC, Check.SCORES, added=EVERY, parts=ANYWHERE, fused=True),
    Line("flexctc_beam", "flashlight", FLASHLIGHT, Check.WER, CPU),
    Line("flexctc_beam", "pyctcdecode", PYCTCDECODE, Check.WER, CPU, (LM, BOTH)),
    *(Line("flexctc_beam", "word_graph", peer, Check.SCORES, CPU) for peer in (COMPACT, NORMAL)),
    Line("flexctc_beam", "", None, Check.SCORES, CPU, (BOTH,)),
    Line("alsd_pp", "nemo", MALSD, Check.EQUAL, added=(PLAIN, LM, BOTH), parts=ANYWHERE),
    Line("alsd_pp", "nemo", GREEDY, Check.ALONE, parts=ANYWHERE, greedy=True),
    Line("alsd_pp", "unbatched", ALSD_UNBATCHED, Check.ALONE, CPU, (PLAIN,)),
    Line("aes_pp", "unbatched", MAES_UNBATCHED, Check.ALONE, CPU, (PLAIN, LM)),
    Line("aes_pp", "nemo", MAES, Check.EQUAL, added=(PLAIN, LM, BOTH, PHRASES), parts=ANYWHERE),
    Line("aes_pp", "nemo", GREEDY, Check.ALONE, parts=ANYWHERE, greedy=True),
    *(
        Line(strategy, "greedy_fusion", GREEDY_FUSION, Check.ALONE, added=EVERY, parts=ANYWHERE, fused=True)
        for strategy in TRANSDUCER_STRATEGIES
    ),
    Line("cuda_wfst", "riva", RIVA, Check.ABOUT, GPU, parts=ANYWHERE),
    Line("cuda_wfst", "kaldi_decoder", KALDI_DECODER, Check.WORDS),
    Line("cuda_wfst", "flashlight_words", FLASHLIGHT_WORDS, Check.WER, CPU, parts=ANYWHERE),
    *(Line("cuda_wfst", "topologies", peer, Check.ALONE) for peer in (NORMAL, MINIMAL)),
    Line("cuda_wfst", "nemo", GREEDY_BATCH, Check.ALONE, GPU, parts=(END_TO_END,), greedy=True),
    Line("paged_biglm", "small_lm", SMALL_LM, Check.LM),
    Line("paged_biglm", "large_lm", LARGE_LM, Check.LM),
    Line("paged_biglm", "two_pass", TWO_PASS, Check.LM, CPU),
    *(Line("paged_biglm", peer.name, peer, Check.COSTS, CPU) for peer in (LET, EAGER, BOUNDED_EAGER, EAGER_GROUPS)),
    Line("paged_biglm", "one_thread", ONE_THREAD, Check.COSTS, CPU),
    *(Line(strategy, "on_cpu", peer, Check.ALONE, GPU) for strategy, peer in ON_CPU.items()),
    Line("paged_biglm", "", None, Check.GROUPS),
    Line("paged_biglm", "", None, Check.COSTS, GPU),
)


class Case(NamedTuple):
    """One row to measure."""

    task: Task
    peer: Peer | None  # None: the strategy itself, in another setting
    theirs: Setting
    ours: Setting
    check: Check
    part: str = DECODER  # or END_TO_END: encoder and decoder
    batch: int | None = None  # B; None: all utterances
    skipped: str | None = None  # the reason why this cannot be measured


def make_cases(options: BenchOptions, tasks: list[Task]) -> Iterator[Case]:
    """All rows of a run in mode=batch, in the order in which they are measured and printed."""
    end_to_end = options.device != "cpu" if options.end_to_end is None else options.end_to_end
    for task in tasks:
        for batch in options.batch_sizes or (None,):
            for part in (DECODER, END_TO_END) if end_to_end else (DECODER,):
                for line in lines_of(options):
                    if part in line.parts:
                        for case in _cases(line, options, task):
                            yield case._replace(part=part, batch=batch)


def lines_of(options: BenchOptions) -> list[Line]:
    """The lines of the table for the options of a run."""
    device = options.device.partition(":")[0]
    fit = [line for line in TABLE if line.strategy == options.strategy and device in line.devices]
    return [line for line in fit if line.family in options.peers or not line.family]


def _cases(line: Line, options: BenchOptions, task: Task) -> Iterator[Case]:
    beams = task.weights.graph_beams if options.strategy in GRAPH_STRATEGIES else options.beams
    threads = options.threads
    if line.peer is None:
        for theirs, ours in _own_settings(line, options, max(beams)):
            yield Case(task, None, theirs, ours, line.check, skipped=missing(ours, line, task))
        return
    everything = line.added
    if line.greedy and options.device == "cpu":  # one row: cost and gain of a beam, with an LM if there is one
        beams, everything = (max(beams),), (LM if task.lm else PLAIN,)
    in_graph = line.family == "word_graph"
    if in_graph:
        beams = (max(beams),)
    for lm, boosted in everything:
        if boosted and not options.phrases:
            continue
        for beam in beams:
            ours = Setting(beam, lm, options.phrases * boosted, threads)
            own_beam = 0 if line.fused else max(task.weights.graph_beams) if in_graph else beam
            theirs = Setting(0, threads=threads) if line.greedy else ours._replace(beam_size=own_beam)
            why_not = missing(ours, line, task)
            yield Case(task, line.peer, theirs, ours, line.check, skipped=why_not)
            if why_not in (NO_TDT, NO_TDT_UNBATCHED):
                return


def _own_settings(line: Line, options: BenchOptions, beam: int) -> Iterator[tuple[Setting, Setting]]:
    """Pairs of settings of one strategy: few and many phrases; limits of token groups; a large LM in the
    GPU's memory and in the host's.
    """
    usual = Setting(beam, True, threads=options.threads)
    if line.check is Check.COSTS:
        yield usual._replace(placement="device"), usual._replace(placement="paged")
    elif line.check is Check.GROUPS:
        for size in options.group_sizes:
            yield usual, usual._replace(group_size=size)
    elif options.many_phrases:
        yield usual._replace(phrases=FEW_PHRASES), usual._replace(phrases=options.many_phrases)


def missing(setting: Setting, line: Line, task: Task) -> str | None:
    """The reason why a row cannot be measured, or None."""
    if line.peer is MAES and task.kind == "tdt":
        return NO_TDT
    if line.peer is MAES and setting.lm and setting.phrases:
        return ONE_FUSION
    if line.peer is ALSD_UNBATCHED and task.kind == "tdt":
        return NO_TDT_UNBATCHED
    in_graph = line.strategy in GRAPH_STRATEGIES
    needs = {
        "lm": setting.lm and not in_graph,
        "word_lm": in_graph or line.peer is PYCTCDECODE or line.family == "word_graph",
        "lexicon": bool(setting.phrases),
    }
    absent = [f"{name}=" for name, needed in needs.items() if needed and not getattr(task, name)]
    return f"no {', '.join(absent)} given" if absent else None
