"""Checks of results before timing; only decoders with equal results are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.cases import Case, Check
from benchmarks.ours import LARGE, packed_lm
from benchmarks.peers.base import Batch, Hypothesis, Output, Ready, alone
from benchmarks.tasks import Task
from nemo_gpu_decoding import Path
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.metrics import phrase_score, word_errors

WER_TOLERANCE = 0.5  # percent
# natural log: hundreds of float32 additions in another order, against those of a peer or one in double
TOLERANCES = {Check.ALONE: 0.0, Check.EQUAL: 1e-3}
GRAPH_TOLERANCE, TRANSDUCER_TOLERANCE = 1e-2, 5e-3
LEAST_SAME = 0.95  # share of utterances, of two searches that prune by different knowledge
DRAWS = 2000


class Errors(NamedTuple):
    """Percent of words and of tokens that are wrong; no token errors for decoders that give words. The F-score of
    phrases; None without phrases.
    """

    wer: float
    ter: float | None
    fscore: float | None = None

    @classmethod
    def of(cls, task: Task, outputs: Sequence[Output], phrases: Sequence[str] = ()) -> Errors:
        texts = [o if isinstance(o, str) else task.vocabulary.text(o) for o in outputs]
        wer = 100 * word_errors(task.texts, texts).wer
        fscore = phrase_score(task.texts, texts, phrases).fscore if phrases else None
        if any(isinstance(output, str) for output in outputs):
            return cls(wer, None, fscore)
        spelled = [" ".join(map(str, tokens)) for tokens in task.tokens]
        return cls(wer, 100 * word_errors(spelled, [" ".join(map(str, o)) for o in outputs]).wer, fscore)


class Verdict(NamedTuple):
    verified: bool
    how: str


def verify(case: Case, task: Task, theirs: Ready, ours: Ready, errors: tuple[Errors, Errors]) -> Verdict:
    """Compare the results of the strategy with those of the peer.

    Args:
        task: the utterances to compare, with inputs on the device of both decoders.
        errors: errors of the peer and of the strategy on the whole batch.
    """
    check, (peer_wer, our_wer) = case.check, (errors[0].wer, errors[1].wer)
    figures = f"{check.value}: {our_wer:.2f} % and {peer_wer:.2f} %"
    if check is Check.WER:
        return Verdict(our_wer <= peer_wer, figures)
    if check is Check.ABOUT:
        return Verdict(abs(our_wer - peer_wer) <= WER_TOLERANCE, figures)
    if check is Check.SCORES:
        return recompute(task, ours)
    if check in (Check.LM, Check.GROUPS):
        results, limited = ours.decoder.decode(task.inputs, task.lengths), case.ours.group_size > 0
        verdict = lm_scores(packed_lm(case.task, LARGE), results, limited=limited)
        more = "" if check is Check.LM else f"; {compare(check, task, theirs, ours).how}"
        return Verdict(verdict.verified, verdict.how + more)
    on_gpu = case.batch is not None
    verdict = compare(check, task, ours if check is Check.ALONE else theirs, ours, rounded=on_gpu)
    if check is Check.EQUAL and task.transducer is None:  # a tie is one only if our score is true
        scores = recompute(task, ours)
        return Verdict(verdict.verified and scores.verified, f"{verdict.how}; {scores.how}")
    return verdict


def compare(check: Check, task: Task, theirs: Ready, ours: Ready, *, rounded: bool = False) -> Verdict:
    """Our hypotheses of the batch against the peer's, of utterances alone where its batch matters.

    Half-precision emissions hold exact ties, and which of two equally good hypotheses comes first is
    the decoder's own affair. Near the beam of a word graph one may drop what the other keeps.

    Args:
        rounded: the networks of a transducer may round otherwise in a batch of another size, as on a GPU.
    """
    batch: Batch = (task.inputs, task.lengths)
    assert theirs.hypotheses is not None
    assert ours.hypotheses is not None
    is_alone = check in (Check.EQUAL, Check.ALONE)
    expected = alone(theirs.hypotheses, batch) if is_alone else theirs.hypotheses(*batch)
    is_transducer = task.transducer is not None
    in_networks = is_transducer and (check is Check.EQUAL or rounded)
    tolerance = TRANSDUCER_TOLERANCE if in_networks else TOLERANCES.get(check, GRAPH_TOLERANCE)
    seen: Counter[str] = Counter()
    largest = 0.0
    for n_best, (best, *_) in zip(expected, ours.hypotheses(*batch), strict=True):
        kind, apart = classify(n_best, best, tolerance, per_token=is_transducer)
        seen[kind] += 1
        largest = max(largest, apart)
    count = len(expected)
    others = "".join(f", {seen[kind]} {kind}" for kind in ("tied", "better", "worse") if seen[kind])
    how = f"{check.value}: {seen['equal']}{others} of {count}, scores differ by at most {largest:.1e}"
    how += ", the peer's utterances decoded alone" * (check is Check.EQUAL) + theirs.note
    if is_alone:
        return Verdict(seen["equal"] + seen["tied"] == count, how)
    allowed = (1 - LEAST_SAME) * count if check is Check.COSTS else 0
    return Verdict(seen["worse"] <= allowed, how)


def beside(static: Iterable[Any], results: Iterable[Any]) -> dict[str, int]:
    """How many utterances have the text that the graph of the large LM gives, or another that scores more or less."""
    seen = {"same": 0, "better": 0, "worse": 0}
    for theirs, ours in zip(static, results, strict=True):
        is_better = ours.best.score > theirs.best.score
        seen["same" if ours.best.text == theirs.best.text else "better" if is_better else "worse"] += 1
    return seen


def beside_cpu(task: Task, ours: Ready, on_cpu: Ready) -> Verdict:
    """Our GPU's results against our CPU's: to the bit, but for transducers, whose networks round otherwise."""
    batch, on_host = (task.inputs, task.lengths), (task.inputs.cpu(), task.lengths.cpu())
    if task.transducer is None:
        paths = zip(ours.decoder.decode(*batch), on_cpu.decoder.decode(*on_host), strict=True)
        same, how = [identical(mine.best, other.best) for mine, other in paths], "GPU = CPU to the bit"
    else:
        assert ours.hypotheses is not None
        assert on_cpu.hypotheses is not None
        lists = zip(on_cpu.hypotheses(*on_host), ours.hypotheses(*batch), strict=True)
        kinds = [classify(n_best, best, TRANSDUCER_TOLERANCE, per_token=True)[0] for n_best, (best, *_) in lists]
        same, how = [kind in ("equal", "tied") for kind in kinds], "GPU = CPU but for rounding"
    return Verdict(all(same), f"{how}: {sum(same)} of {len(same)}")


def classify(
    n_best: Sequence[Hypothesis], ours: Hypothesis, tolerance: float, *, per_token: bool
) -> tuple[str, float]:
    """(equal, tied, better or worse; how far apart the scores are if they are held to be the same).

    Args:
        n_best: the peer's hypotheses, best first; if there are several, ours must be among them.
        per_token: the peer ranks by score per token.
    """
    best = n_best[0]
    if len(n_best) > 1 or ours.labels == best.labels:
        listed = next((h.score for h in n_best if h.labels == ours.labels), None)
        if listed is None:
            return "worse", 0.0
        gain = ours.score - listed
        if not abs(gain) <= tolerance:
            return ("better" if gain > 0 else "worse"), 0.0
        if ours.labels == best.labels:
            return "equal", abs(gain)
        lengths = (len(ours.labels) + 1, len(best.labels) + 1) if per_token else (1, 1)
        behind = listed / lengths[0] - best.score / lengths[1]
        return ("tied" if abs(behind) <= tolerance / lengths[0] else "worse"), abs(gain)
    gain = ours.score - best.score
    if abs(gain) <= tolerance:
        return "tied", abs(gain)
    return ("better" if gain > 0 else "worse"), 0.0


def recompute(task: Task, ours: Ready) -> Verdict:
    """Every score of a CTC beam from log-probs, LM and boosting tree."""
    paths = [nbest.best for nbest in ours.decoder.decode(task.inputs, task.lengths)]
    apart = [
        abs(true_score(path, log_probs[:length], ours) - path.score)
        for path, log_probs, length in zip(paths, task.inputs, task.lengths.tolist(), strict=True)
    ]
    right = sum(difference <= TOLERANCES[Check.EQUAL] for difference in apart)
    how = f"{Check.SCORES.value}: {right} of {len(paths)} agree, largest difference {max(apart):.1e}"
    return Verdict(right == len(paths), how)


def lm_scores(lm: PackedLM, results: Iterable[Any], *, limited: bool = False) -> Verdict:
    """Is the LM's part of every score what the LM itself gives for the words, asked one by one?

    Hypotheses that were cut off within a word have paid for a part of it; they are only counted. Where groups are
    `limited`, the cheapest path of a text may have been left out, and one by the small LM's back-off costs more.
    """
    differences: list[float] = []
    cut_off = 0
    for nbest in results:
        if any(note.startswith("no hypothesis has reached a final state") for note in nbest.notes):
            cut_off += 1
            continue
        words = [word.text for word in nbest.best.words]
        differences.append(-nbest.best.parts.lm - lm.score(words))
    right = sum(abs(difference) <= GRAPH_TOLERANCE for difference in differences)  # NaN is not
    dearer = sum(difference > GRAPH_TOLERANCE for difference in differences) if limited else 0
    verified = len(differences) > cut_off and right + dearer == len(differences)
    how = f"LM scores of {right} of {len(differences)} texts off by at most {GRAPH_TOLERANCE:.0e}"
    how += f", {dearer} found by dearer paths" * (dearer > 0)
    return Verdict(verified, f"{how}; {cut_off} more end within a word" if cut_off else how)


def true_score(path: Path, log_probs: torch.Tensor, ours: Ready) -> float:
    """The score of a path from first principles; log_probs [T, V + 1]."""
    fusion, tokens = ours.fusion, path.tokens.tolist()
    labels = np.full(len(log_probs), log_probs.shape[1] - 1)
    for token, frame, repeats in zip(tokens, path.frames, path.repeats, strict=True):
        labels[frame : frame + repeats] = token
    score = float(log_probs.double().cpu().numpy()[np.arange(len(labels)), labels].sum())
    if fusion.lm:
        score += fusion.lm_weight * fusion.lm.score(tokens) + ours.beam_beta * len(tokens)
    if fusion.boosting:
        score += fusion.boosting_weight * fusion.boosting.score(tokens)
    return score


def wer_difference(references: list[str], first: list[str], second: list[str]) -> tuple[float, float]:
    """The second word error rate minus the first, in percent: an interval with 95 % of 2,000 draws of utterances.

    Each draw has as many utterances as there are, with repetitions, the same ones of both (paired bootstrap).
    """
    counts = [[word_errors([text], [found[n]]) for found in (first, second)] for n, text in enumerate(references)]
    more = np.array([theirs.total - own.total for own, theirs in counts])
    words = np.array([own.words for own, _ in counts])
    drawn = np.random.default_rng(0).integers(len(more), size=(DRAWS, len(more)))
    low, high = np.percentile(100 * more[drawn].sum(axis=1) / words[drawn].sum(axis=1), [2.5, 97.5])
    return float(low), float(high)


def identical(path: Path, other: Path) -> bool:
    """All numbers of both are equal, to the bit."""
    for field in fields(path):
        mine, theirs = getattr(path, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
            if not (type(mine) is type(theirs) and np.array_equal(mine, theirs)):
                return False
        elif mine != theirs:
            return False
    return True
