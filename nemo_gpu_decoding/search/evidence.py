"""Check the evidence of boosted phrases: a phrase stays in a result only if the log-probs support it.

The evidence of a phrase is the smallest posterior of its tokens (`Path.token_confidence`). A mean would hide the wrong
token of an inserted phrase, because a transducer finds the rest of a phrase likely after its first tokens. A posterior
compares a token with all alternatives of its frames, without bonuses and LM. If a phrase of the best hypothesis has
less evidence than the tree's `ac_threshold`, the utterance is decoded again with the phrases that have enough
evidence. Beams seldom hold a hypothesis without the phrase, because the bonus favours the others.

A phrase in the second result passed the check before, or has no bonus. If a phrase fails the check in the second
search, a third search boosts fewer phrases, and so on.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from nemo_gpu_decoding.fusion.boosting import BoostingTree, Key
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.engine import Streams
from nemo_gpu_decoding.search.result import FoundPhrase, NBest, Path, new_frozen

R = TypeVar("R", bound=NBest[Any])


class Units(NamedTuple):
    """The labels or words of a path that a boosting tree reads, with their tokens."""

    values: Sequence[Hashable]
    first_tokens: Sequence[int]
    end_tokens: Sequence[int]  # one past the last token of each


UnitsOf = Callable[[Any], Units]
Decode = Callable[..., list[R]]


def found_phrases(path: Path, tree: BoostingTree, units: Units) -> list[FoundPhrase]:
    """Return the phrases of a path, in their order."""
    phrases: list[FoundPhrase] = []
    for number, begin, end in tree.occurrences(units.values):
        first, last = units.first_tokens[begin], units.end_tokens[end - 1]
        if first == last:  # a ready-made graph may emit a word without tokens
            continue
        if not phrases:  # lists, because NumPy is slow for single items
            posteriors = path.token_confidence.tolist()
            begins, ends = path.frames.tolist(), (path.frames + path.repeats).tolist()
        text, evidence = tree.table.texts[number], min(posteriors[first:last])
        phrases.append(FoundPhrase(text, first, last, begins[first], ends[last - 1], evidence))
    return phrases


def with_evidence(
    streams: Streams, rows: Sequence[int], results: list[R], units_of: UnitsOf, decode: Decode[R]
) -> list[R]:
    """Return final results with their phrases, after decoding again without phrases that lack evidence.

    Args:
        rows: the stream number of each result.
        decode: decodes a list of inputs with requests.
    """
    if not any(nbest.best.parts.boosting for nbest in results):
        return results
    failed: dict[int, Request] = {}
    trees = [streams.tree_of(b) if nbest.best.parts.boosting else None for b, nbest in zip(rows, results, strict=True)]
    results = [_with_phrases(nbest, tree, units_of) for nbest, tree in zip(results, trees, strict=True)]
    for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        if tree is None or row not in streams.requests:
            continue
        if any(phrase.evidence < tree.ac_threshold for phrase in results[i].phrases):
            left = _left_phrases(results[i], tree, units_of(results[i].best))
            request = streams.requests[row]
            failed[i] = replace(request, boosting_weight=0.0) if left is None else replace(request, boosting=left)
    if not failed:
        return results
    inputs = [torch.cat(streams.heard[rows[i]]) for i in failed]
    for i, again in zip(failed, decode(inputs, requests=list(failed.values())), strict=True):
        shown = streams.shown[rows[i]]
        if np.array_equal(again.best.tokens[:shown], results[i].best.tokens[:shown]):
            changes: dict[str, Any] = {name: getattr(again, name) for name in ("paths", "notes", "lattice", "work")}
            results[i] = _with_phrases(replace(results[i], **changes, phrases=()), trees[i], units_of)
    return results


def _with_phrases(nbest: R, tree: BoostingTree | None, units_of: UnitsOf) -> R:
    if tree is None:
        return nbest
    phrases = found_phrases(nbest.best, tree, units_of(nbest.best))
    return new_frozen(type(nbest), **{**vars(nbest), "phrases": tuple(phrases)}) if phrases else nbest


def _left_phrases(nbest: NBest[Any], tree: BoostingTree, units: Units) -> BoostingTree | None:
    """Return the phrases that pass the check at least once in the best hypothesis or, if all do, each time."""
    passed: set[Key] = set()
    below: set[Key] = set()
    for (number, *_), phrase in zip(tree.occurrences(units.values), nbest.phrases, strict=True):
        (below if phrase.evidence < tree.ac_threshold else passed).add(tree.table.keys[number])
    return tree.only(passed if len(passed) < tree.num_phrases else passed - below)


def as_committed(streams: Streams, rows: Sequence[int], results: list[R], units_of: UnitsOf) -> list[R]:
    """Return partial results whose committed tokens contain no phrase that the check may remove.

    A phrase that begins in the committed tokens ends in tokens that all live hypotheses share.
    """
    if not streams.shown:
        return results
    results, shown = list(results), dict(streams.shown)
    for i, row in enumerate(rows):
        tree = streams.tree_of(row)
        if tree is None or row not in shown:
            continue
        nbest, units = results[i], units_of(results[i].best)
        phrases = found_phrases(nbest.best, tree, units)
        unsure = [phrase.first_token for phrase in phrases if phrase.evidence < tree.ac_threshold]
        if nbest.committed is not None:
            shared = sum(end <= nbest.committed for end in units.end_tokens)
            sure = shared - max(tree.longest, 1) + 1  # units
            shown[row] = max(shown[row], min([units.end_tokens[sure - 1] if sure > 0 else 0, *unsure]))
            nbest = replace(nbest, committed=shown[row])
        results[i] = replace(nbest, phrases=tuple(phrases))
    streams.shown = shown
    return results
