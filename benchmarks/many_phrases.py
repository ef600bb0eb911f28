"""Time of flexctc_beam with long lists of phrases, with aliases and evidence gate, beside that with a few phrases.

Both searches get the same utterances in turn. A ratio is the median of the ratios of their CPU times, with one thread.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.clock import HostClock, time_in_turn, torch_threads
from benchmarks.options import TASKS, BenchOptions
from benchmarks.sources import make_tasks
from benchmarks.tasks import Task
from nemo_gpu_decoding import (
    BoostingConfig,
    FlexCTCBeam,
    FlexCTCConfig,
    Fusion,
    Phrase,
    build_boosting_tree,
    load_ngram_lm,
)
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.fusion.default_bonuses import weight_of_list
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.many_phrases"
SUMMARY = "time of the search with long lists of phrases"
EXAMPLES = ("tasks=[hard] phrases=[10,20000]",)


@dataclass
class ManyPhrasesOptions:
    """Options of the table."""

    # Inputs, as in `python -m benchmarks`: peaked (V = 1024) and hard (V = 128).
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    # Numbers of phrases; the first one is the base of the ratios. Half of them occur in the references, if possible.
    phrases: list[int] = field(default_factory=lambda: [10, 1000, 20_000])
    # Aliases per phrase besides its own spelling: random pairs of words.
    aliases: int = 2
    # Weight of the phrases; null: the default for a list of this length.
    boosting_weight: float | None = None
    # Least probability of a phrase in a result; 0: no gate.
    ac_threshold: float = 0.0003
    # Hypotheses per frame.
    beam_size: int = 8
    # Utterances.
    utterances: int = 8
    # Measurements in turn.
    repeats: int = 25


OPTIONS = ManyPhrasesOptions


def run(options: ManyPhrasesOptions) -> int:
    """Print the table."""
    rows = []
    with torch_threads(1):
        for task in make_tasks(BenchOptions(tasks=options.tasks, utterances=options.utterances)):
            for lm in (False, True):
                rows += [[task.name, "LM" if lm else "", *row] for row in measure(options, task, lm)]
    print(format_table(["task", "", "phrases", "found", "ms / utterance", "ratio"], rows))
    return 0


def measure(options: ManyPhrasesOptions, task: Task, lm: bool) -> list[list[object]]:
    """A row for each number of phrases: phrases found, milliseconds per utterance, ratio of the first one's time."""
    searches = [decoder(options, task, count, lm) for count in options.phrases]
    found = [sum(len(nbest.phrases) for nbest in search.decode(task.inputs, task.lengths)) for search in searches]
    calls = [lambda own=search: own.decode(task.inputs, task.lengths) for search in searches]
    times = [[seconds.cpu for seconds in own] for own in time_in_turn(calls, HostClock(), options.repeats, 1e9)]
    rows: list[list[object]] = []
    for count, phrases, own in zip(options.phrases, found, times, strict=True):
        ratio = statistics.median(a / b for a, b in zip(own, times[0], strict=True))
        milliseconds = 1e3 * statistics.median(own) / len(task.texts)
        rows.append([count, phrases, f"{milliseconds:.2f}", f"{ratio:.2f}"])
    return rows


def decoder(options: ManyPhrasesOptions, task: Task, count: int, lm: bool) -> FlexCTCBeam:
    """The search with so many phrases."""
    tree = build_boosting_tree(
        with_aliases(task, task.phrases(count), options.aliases),
        task.vocabulary,
        BoostingConfig(ac_threshold=options.ac_threshold),
    )
    loaded = load_ngram_lm(task.lm, task.vocab_size, encoding="nemo") if lm and task.lm else None
    config = FlexCTCConfig(
        beam_size=options.beam_size, beam_beta=task.weights.beam_beta if lm else 0.0, threads=1, backend="cpu"
    )
    fusion = Fusion(loaded, task.weights.lm_weight, tree, weight_of_list(options.boosting_weight, count))
    return FlexCTCBeam(task.vocab_size, task.vocab_size, config, fusion)


def with_aliases(task: Task, phrases: Sequence[str], aliases: int) -> list[Phrase]:
    """The phrases with aliases, no two alike."""
    words, rng, taken = sorted(task.lexicon), np.random.default_rng(0), set(phrases)
    found = []
    for phrase in phrases:
        own = [phrase]
        while len(own) <= aliases:
            alias = " ".join(words[i] for i in rng.choice(len(words), 2))
            if alias not in taken:
                own.append(alias)
                taken.add(alias)
        found.append(Phrase(phrase, aliases=tuple(own)))
    return found


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
