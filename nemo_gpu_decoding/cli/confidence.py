"""The map of word confidence that `tune confidence=...` fits on the dev set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.calibration import ConfidenceMap, calibrated, fit_map, measure, right_words
from nemo_gpu_decoding.cli.decoding import section_of
from nemo_gpu_decoding.manifest import Utterance
from nemo_gpu_decoding.report import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Head, Outputs

FOLDS = 5  # of the utterances; the map of the others is measured on each of them
Words = tuple[list[float], list[bool]]  # confidences of the words of an utterance, and whether they are right


def with_confidence_map(
    head: Head, config: DictConfig, utterances: Sequence[Utterance], aggregations: Sequence[str], batch_size: int
) -> tuple[DictConfig, str]:
    """A decoding section with the map of its word confidence, and a table of the aggregations that were tried.

    Args:
        aggregations: of token confidence to words; the one with the best normalised cross entropy is taken.
    """
    outputs = list(head.model.encode([utterance.audio for utterance in utterances], batch_size))
    rows: list[list[Any]] = []
    best: tuple[float, str, ConfidenceMap] | None = None
    for aggregation in aggregations:
        words = words_of(head, _with(config, aggregation, None), utterances, outputs)
        before = measure(*joined(words))
        after = measure(*joined(_held_out(words)))
        rows += [[aggregation, *(f"{value:.3f}" for value in (*before, *after))]]
        if best is None or after.nce > best[0]:
            best = after.nce, aggregation, fit_map(*joined(words))
    assert best is not None
    header = ["aggregation", "ECE", "NCE", "AUC", "mapped: ECE", "NCE", "AUC"]
    table = format_table(header, rows)
    return _with(config, *best[1:]), f"word confidence on the dev set, cross-validated:\n{table}"


def _with(config: DictConfig, aggregation: str, fitted: ConfidenceMap | None) -> DictConfig:
    """The section with this confidence."""
    given: dict[str, Any] = {"confidence_cfg": {"preserve_word_confidence": True, "aggregation": aggregation}}
    given[section_of(str(config.strategy))] = {"confidence_map": fitted and list(fitted)}
    return cast(DictConfig, OmegaConf.merge(config, given))


def words_of(
    head: Head, config: DictConfig, utterances: Sequence[Utterance], outputs: Sequence[Outputs]
) -> list[Words]:
    """The words of each utterance."""
    head.use(cast(DictConfig, OmegaConf.merge(config, {"compute_timestamps": True})))
    found = [transcript.words for batch in outputs for transcript in head.model.decode(batch)]
    words: list[Words] = []
    for utterance, own in zip(utterances, found, strict=True):
        right = right_words(str(utterance.text), [word.word for word in own])
        pairs = [(word.confidence, ok) for word, ok in zip(own, right, strict=True) if word.confidence is not None]
        words.append(([confidence for confidence, _ in pairs], [ok for _, ok in pairs]))
    return words


def _held_out(words: Sequence[Words]) -> list[Words]:
    """The words with their confidence mapped, by maps that were fitted on other utterances."""
    found = []
    for fold in range(FOLDS):
        fitted = fit_map(*joined([own for n, own in enumerate(words) if n % FOLDS != fold]))
        found += [(calibrated(confidence, fitted), right) for confidence, right in words[fold::FOLDS]]
    return found


def joined(words: Sequence[Words]) -> Words:
    return [value for own, _ in words for value in own], [value for _, own in words for value in own]
