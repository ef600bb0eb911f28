"""Reorder n-best lists in a second pass, by an LM that is too slow for the search.

    decoder = FlexCTCBeam(..., FlexCTCConfig(n_best=50), fusion)
    nbests = decoder.decode(log_probs, lengths)
    best = rescored(nbests, scorer, lambda path: vocabulary.text(path.tokens), weight=0.4)[0].best

The score of a path becomes acoustic + lm_share * lm + boosting + insertion + weight * log P(text) +
word_bonus * words.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_number
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import is_packed_lm, load_packed_lm
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.search.result import NBest, Path

P = TypeVar("P", bound=Path)
# log P of each text, natural log; called once with all distinct texts
TextScorer = Callable[[Sequence[str]], Sequence[float]]


def rescored(
    nbests: Iterable[NBest[P]],
    scorer: TextScorer,
    text_of: Callable[[P], str],
    *,
    weight: float,
    lm_share: float = 1.0,
    word_bonus: float = 0.0,
) -> list[NBest[P]]:
    """Return n-best lists in the order of their rescored paths.

    Args:
        nbests: n-best lists of any decoder.
        scorer: log-probabilities of texts, natural log; called once with all distinct texts.
        text_of: the text of a path for the scorer; for paths of word graphs `lambda path: path.text`.
        weight: factor of the scorer's log-probability, >= 0.
        lm_share: factor of the first LM's part of the score, >= 0; 0 drops that LM.
        word_bonus: bonus per word, natural log; a value > 0 offsets deletions.

    Returns:
        Lists of the same paths, best first by the new score; ties keep their order.

    Raises:
        ValueError: a weight is out of range; the scorer returns a wrong number of scores, or NaN.
    """
    check_number("weight", weight)
    check_number("lm_share", lm_share)
    check_number("word_bonus", word_bonus, negative=True)
    nbests = list(nbests)
    texts = [nbest.texts(text_of) for nbest in nbests]
    log_probs = _scores(scorer, list(dict.fromkeys(text for row in texts for text in row)))
    lists = []
    for nbest, row in zip(nbests, texts, strict=True):
        paths = []
        for path, text in zip(nbest, row, strict=True):
            second = weight * log_probs[text] + word_bonus * len(text.split())
            parts = replace(path.parts, lm=lm_share * path.parts.lm, second_pass=second)
            score = path.score - path.parts.lm - path.parts.second_pass + parts.lm + second
            paths.append(replace(path, score=score, parts=parts))
        lists.append(replace(nbest, paths=tuple(sorted(paths, key=lambda path: -path.score))))
    return lists


def _scores(scorer: TextScorer, texts: list[str]) -> dict[str, float]:
    values = [float(value) for value in scorer(texts)] if texts else []
    if len(values) != len(texts):
        raise ValueError(f"scorer gave {len(values)} scores, expected one for each of {len(texts)} texts")
    for text, value in zip(texts, values, strict=True):
        if np.isnan(value):
            raise FieldError("scorer", value, "a log-probability", f"for the text {text!r}")
    return dict(zip(texts, values, strict=True))


class Rescoring(NamedTuple):
    """Options that the command line has for a second pass; the fields are arguments of `rescored`."""

    scorer: TextScorer
    weight: float
    lm_share: float = 1.0

    def changes(self, texts: Sequence[str], lm_scores: Sequence[float]) -> list[float]:
        """Return by how much the score of each text changes, given the first LM's part of each score."""
        log_probs = _scores(self.scorer, list(dict.fromkeys(texts)))
        return [
            self.weight * log_probs[text] + (self.lm_share - 1.0) * lm_score
            for text, lm_score in zip(texts, lm_scores, strict=True)
        ]

    def reordered(self, hypotheses: Sequence[Any]) -> list[Any]:
        """Return NeMo's hypotheses with their new scores, best first."""
        parts = [getattr(hypothesis, "score_parts", None) for hypothesis in hypotheses]
        if self.lm_share != 1 and None in parts:
            raise ValueError(
                f"rescore_lm_share is {self.lm_share}, expected 1 with a strategy whose scores are not known by parts"
            )
        lm_scores = [0.0 if known is None else known.lm for known in parts]
        changes = self.changes([hypothesis.text for hypothesis in hypotheses], lm_scores)
        for hypothesis, change in zip(hypotheses, changes, strict=True):
            hypothesis.score = float(hypothesis.score) + change
        return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def load_scorer(name: str) -> TextScorer:
    """Load an n-gram LM over words: a file of `pack-lm`, or ARPA. The scorer caches log P of texts, </s> included.

    Words that the LM does not list are scored as <unk>.

    Raises:
        ValueError: there is no such file; it is damaged, or is not an LM.
    """
    path = path_of(name)
    if not path.is_file():
        raise ValueError(f"rescore={name} is no file here, expected a word n-gram LM: a file of pack-lm, or ARPA")
    lm = load_packed_lm(path) if is_packed_lm(path) else pack_arpa_in_memory(path)
    known: dict[str, float] = {}

    def log_probs(texts: Sequence[str]) -> list[float]:
        return [-lm.score(text.split(), final=lm.sentence_end >= 0) for text in texts]

    def scores(texts: Sequence[str]) -> list[float]:
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(_scores(log_probs, new))
        return [known[text] for text in texts]

    return scores
