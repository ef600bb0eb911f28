"""Measures of the evidence of boosted phrases: do they tell spoken phrases from inserted ones?

Each set and head of `boosting_cells` is decoded with the weight of its preset: dev with its list, and dev and test
with distractors only, whose phrases are all wrong. The threshold of a measure is the largest that loses no spoken
phrase of dev.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from benchmarks.boosting_cells import NOTHING, Cell, CellOptions, Way, cells, choose_lm_weight
from benchmarks.clock import torch_threads
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.metrics import PhraseWords
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.search.result import FoundPhrase, NBest

PROGRAM = "python -m benchmarks.phrase_evidence"
SUMMARY = "measures of the evidence of boosted phrases"
EXAMPLES = ("", "folder=REAL_SPEECH threads=2")
OPTIONS = CellOptions
LEAST = 1e-30  # posterior, so that its logarithm is finite


class Evidence(NamedTuple):
    """Measures of a phrase, natural log; larger is more likely spoken."""

    least: float  # the smallest posterior of its tokens: the evidence in results
    mean: float  # of its tokens' posteriors
    ratio: float  # `mean` less that of the tokens in the same frames without phrases
    score: float  # score without bonuses less that of the result without phrases, per token


NAMES = ("evidence", "mean posterior", "likelihood ratio", "score difference")


class Judged(NamedTuple):
    """A phrase of a result."""

    is_spoken: bool
    is_plain: bool  # the result without phrases has it, too
    evidence: Evidence


def run(options: CellOptions) -> int:
    """Print the table: all sets of a strategy together."""
    found: dict[str, dict[str, list[Judged]]] = defaultdict(lambda: defaultdict(list))
    with TemporaryDirectory() as temporary, torch_threads(options.threads):
        for name, cell in cells(options, temporary):
            print(f"{name}, {cell.name}", file=sys.stderr, flush=True)
            choose_lm_weight(cell)
            for phrases in ("dev", "dev-wrong", "test-wrong"):
                found[cell.name.removesuffix(" + LM")][phrases] += judged(cell, phrases)
    rows = [[head, *row] for head, lists in found.items() for row in rows_of(lists)]
    titles = ["head", "measure", "spoken", "AUC", "threshold", "inserted: dev", "left", "inserted: test", "left"]
    print(format_table(titles, rows))
    return 0


def judged(cell: Cell, phrases: str) -> Iterator[Judged]:
    """The phrases of all results with one list."""
    part = phrases.partition("-")[0]
    boosted = cell.results(Way("default", cell.kind.default), phrases)
    for (reference, _, nbest), (_, plain_text, plain) in zip(boosted, cell.results(NOTHING, part), strict=True):
        seen: Counter[str] = Counter()
        for phrase in nbest.phrases:
            seen[phrase.text] += 1
            said, plainly = (times(phrase.text, text) >= seen[phrase.text] for text in (reference, plain_text))
            yield Judged(said, plainly, evidence_of(phrase, nbest, plain))


def times(phrase: str, text: str) -> int:
    """How often a text has a phrase."""
    return sum(1 for _ in PhraseWords.of([phrase]).found_in(text.split()))


def evidence_of(phrase: FoundPhrase, nbest: NBest, plain: NBest) -> Evidence:
    """The measures of a phrase, beside the result without phrases."""
    best, other = nbest.best, plain.best
    own = np.log(np.maximum(best.token_confidence[phrase.first_token : phrase.end_token], LEAST))
    is_beside = (other.frames >= phrase.start_frame - 1) & (other.frames <= phrase.end_frame)
    beside = np.log(np.maximum(other.token_confidence[is_beside], LEAST))
    difference = (best.score - best.parts.boosting - other.score) / len(own)
    return Evidence(own.min(), own.mean(), own.mean() - (beside.mean() if len(beside) else 0.0), difference)


def rows_of(lists: dict[str, list[Judged]]) -> Iterator[list[object]]:
    """A row for each measure. Phrases that the result without phrases has, too, are right without evidence."""
    spoken = [each.evidence for each in lists["dev"] if each.is_spoken and not each.is_plain]
    wrong = {part: [each.evidence for each in lists[f"{part}-wrong"] if not each.is_plain] for part in ("dev", "test")}
    for n, name in enumerate(NAMES):
        own = [evidence[n] for evidence in spoken]
        others = {part: [evidence[n] for evidence in found] for part, found in wrong.items()}
        least = min(own, default=-np.inf)
        counts = [count for found in others.values() for count in (len(found), sum(e >= least for e in found))]
        yield [name, len(own), f"{auc(own, others['dev']):.2f}", f"{least:.2f}", *counts]


def auc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The probability that a right one has more than a wrong one; NaN if there are none."""
    pairs = [(a > b) + 0.5 * (a == b) for a in right for b in wrong]
    return float(np.mean(pairs)) if pairs else float("nan")


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
