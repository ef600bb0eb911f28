"""Compute the encoder output of the dev set once, and let `tune` decode it many times.

`tune confidence=...` also fits a map from word confidence to probability on the dev set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from nemo_gpu_decoding import metrics
from nemo_gpu_decoding.cli.decoding import section_of
from nemo_gpu_decoding.manifest import Utterance, references_of
from nemo_gpu_decoding.plain_text import format_table

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nemo_gpu_decoding.nemo_plugin.model import Head, Outputs
    from nemo_gpu_decoding.search.decoder import Decoder
    from nemo_gpu_decoding.search.rescoring import Rescoring
    from nemo_gpu_decoding.search.result import NBest, Path

    Search = Decoder[Any, Any]


BATCH = 32  # utterances decoded in one call; bounds the padding, has no effect on results


class PaddedBatch(NamedTuple):
    """The encoder outputs of up to `BATCH` utterances, padded to one length."""

    # [B, T, V + 1] log-probs, natural log; for transducers [B, T, D] encoder output
    inputs: torch.Tensor
    lengths: torch.Tensor  # [B] int64


@dataclass(frozen=True)
class DevSet:
    """The encoder output, references and greedy texts of the utterances of a manifest."""

    batches: tuple[PaddedBatch, ...]
    references: tuple[str, ...]
    greedy_texts: tuple[str, ...]
    audio_seconds: float

    def decode(
        self, decoder: Search, text_of: Callable[[Path], str], second: Rescoring | None = None, n_best: int = 1
    ) -> tuple[str, ...]:
        """Return the text of the best hypothesis of each utterance.

        Args:
            second: the second pass, which re-ranks the best `n_best` different texts.
        """
        results: list[NBest] = []
        for batch in self.batches:
            results += decoder.decode(*batch)
        if second is not None:
            from nemo_gpu_decoding.search.rescoring import rescored

            results = [nbest.distinct(text_of, n_best) for nbest in results]
            results = rescored(results, second.scorer, text_of, weight=second.weight, lm_share=second.lm_share)
        return tuple(nbest.texts(text_of)[0] for nbest in results)

    def score(self, texts: Sequence[str], phrases: Sequence[str]) -> Score:
        found = metrics.phrase_score(self.references, texts, phrases) if phrases else None
        return Score(metrics.word_errors(self.references, texts), found)


@dataclass(frozen=True)
class Score:
    """Word errors of one decoding of the dev set and, if a phrase list was given, recall and precision of phrases."""

    errors: metrics.WordErrors
    phrases: metrics.PhraseScore | None


def encode(head: Head, utterances: Sequence[Utterance], *, batch_size: int = 8, dtype: str = "float32") -> DevSet:
    """Run the encoder over all utterances, with a progress bar on stderr.

    Args:
        dtype: type of the stored output; float16 halves the memory and rounds to three digits.
    """
    files = [utterance.audio for utterance in utterances]
    outputs = head.encoded(files, batch_size=batch_size)
    shown = tqdm(outputs, total=len(files), unit="utt", desc="encoder", disable=None, file=sys.stderr)
    arrays, texts = zip(*((encoded.inputs, encoded.greedy_text) for encoded in shown), strict=True)
    return DevSet(
        batches=tuple(_pad(arrays[i : i + BATCH], dtype) for i in range(0, len(arrays), BATCH)),
        references=tuple(references_of(utterances)),
        greedy_texts=texts,
        audio_seconds=sum(utterance.duration for utterance in utterances),
    )


def _pad(arrays: Sequence[np.ndarray], dtype: str) -> PaddedBatch:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    padded = pad_sequence([torch.from_numpy(array.astype(dtype)) for array in arrays], batch_first=True)
    return PaddedBatch(padded, torch.tensor([len(array) for array in arrays]))


FOLDS = 5  # folds of utterances; a map fitted on the other folds is measured on each fold
Words = tuple[list[float], list[bool]]  # confidences of the words of an utterance, and whether they are right


def with_confidence_map(
    head: Head, config: DictConfig, utterances: Sequence[Utterance], aggregations: Sequence[str], batch_size: int
) -> tuple[DictConfig, str]:
    """Return the decoding section with a fitted confidence map, and a table of all aggregations that were tried.

    Args:
        aggregations: ways to combine token confidence per word; the best normalised cross entropy decides.
    """
    outputs = list(head.model.encode([utterance.audio for utterance in utterances], batch_size))
    rows: list[list[Any]] = []
    best: tuple[float, str, metrics.ConfidenceMap] | None = None
    for aggregation in aggregations:
        words = words_of(head, _with(config, aggregation, None), utterances, outputs)
        before = metrics.measure(*joined(words))
        after = metrics.measure(*joined(_held_out(words)))
        rows += [[aggregation, *(f"{value:.3f}" for value in (*before, *after))]]
        if best is None or after.nce > best[0]:
            best = after.nce, aggregation, metrics.fit_map(*joined(words))
    assert best is not None
    header = ["aggregation", "ECE", "NCE", "AUC", "mapped: ECE", "NCE", "AUC"]
    table = format_table(header, rows)
    return _with(config, *best[1:]), f"word confidence on the dev set, cross-validated:\n{table}"


def _with(config: DictConfig, aggregation: str, fitted: metrics.ConfidenceMap | None) -> DictConfig:
    """Return the decoding section with an aggregation of word confidence and a confidence map."""
    given: dict[str, Any] = {"confidence_cfg": {"preserve_word_confidence": True, "aggregation": aggregation}}
    given[section_of(str(config.strategy))] = {"confidence_map": fitted and list(fitted)}
    return cast(DictConfig, OmegaConf.merge(config, given))


def words_of(head: Head, config: DictConfig, utterances: Sequence[Utterance], outputs: list[Outputs]) -> list[Words]:
    """Decode each utterance; return the confidences of its words and whether the words are right."""
    head.use(cast(DictConfig, OmegaConf.merge(config, {"compute_timestamps": True})))
    words_of_utterances = [transcript.words for batch in outputs for transcript in head.model.decode(batch)]
    words: list[Words] = []
    for utterance, heard in zip(utterances, words_of_utterances, strict=True):
        right = metrics.right_words(str(utterance.text), [word.word for word in heard])
        pairs = [(word.ranked, ok) for word, ok in zip(heard, right, strict=True) if word.ranked is not None]
        words.append(([confidence for confidence, _ in pairs], [ok for _, ok in pairs]))
    return words


def _held_out(words: Sequence[Words]) -> list[Words]:
    """Return the words with mapped confidence; each utterance's map was fitted on other utterances."""
    mapped = []
    for fold in range(FOLDS):
        fitted = metrics.fit_map(*joined([utterance for n, utterance in enumerate(words) if n % FOLDS != fold]))
        mapped += [(metrics.calibrated(confidence, fitted), right) for confidence, right in words[fold::FOLDS]]
    return mapped


def joined(words: Sequence[Words]) -> Words:
    """Concatenate the word confidences of all utterances, and whether the words are right."""
    pairs = [pair for confidences, rights in words for pair in zip(confidences, rights, strict=True)]
    return [confidence for confidence, _ in pairs], [is_right for _, is_right in pairs]
