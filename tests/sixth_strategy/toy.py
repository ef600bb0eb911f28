"""A sixth strategy in plain Python: CTC beam search that keeps the best alignment of each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.checks import check_kind
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.config import SearchConfig
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Engine, Streams
from nemo_gpu_decoding.search.inputs import as_float32, check_log_probs, raise_bad_frame
from nemo_gpu_decoding.search.numerics import MOST_LOG_PROB
from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts


@checked_options
@dataclass(frozen=True)
class ToyConfig(SearchConfig):
    beam_size: int = option(6, low=1, high=100)


class Token(NamedTuple):
    frame: int
    log_probs: tuple[float, ...]  # of its frames


class Hypothesis(NamedTuple):
    score: float
    text: tuple[int, ...]
    last: int  # label of the last frame
    tokens: tuple[Token, ...]
    states: tuple[int, int]  # of LM and boosting tree


class ToyEngine(Engine):
    """All that the streams remember: a beam and a number of frames each."""

    def __init__(self, config: ToyConfig, blank_id: int, fusion: BatchFusion) -> None:
        self.config, self.blank_id, self.fusion = config, blank_id, fusion
        starts = [(int(fusion.lm_starts[b]), fusion.trees[n].start_state) for b, n in enumerate(fusion.tree_of)]
        self.beams = [[Hypothesis(0.0, (), blank_id, (), start)] for start in starts]
        self.frames = np.zeros(len(fusion), np.int64)

    def push(self, inputs, lengths, *, deferred=False) -> None:
        values, beams = as_float32(inputs), self.beams.copy()
        for b, length in enumerate(lengths):
            for t in range(length):
                beams[b] = self._advanced(beams[b], values[b, t], b, int(self.frames[b]) + t)
                if not beams[b] or not (values[b, t] <= MOST_LOG_PROB).all():
                    raise_bad_frame(values, b, t)
        self.beams, self.frames = beams, self.frames + lengths

    def results(self, rows: Sequence[int], n_best: int, *, final: bool):
        found = []
        for b in rows:
            scored = (h._replace(score=h.score + sum(self._weights(b, h, final))) for h in self.beams[b])
            texts = {h.text: h for h in sorted(scored, key=lambda h: h.score)}  # the best of each text
            found.append(sorted(texts.values(), key=lambda h: (-h.score, h.text))[:n_best])
        return found

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        self.fusion, fresh = fusion, ToyEngine(self.config, self.blank_id, fusion)
        for b in rows:
            self.beams[b], self.frames[b] = fresh.beams[b], 0

    def _advanced(self, beam: list[Hypothesis], row: np.ndarray, b: int, t: int) -> list[Hypothesis]:
        best: dict[tuple, Hypothesis] = {}
        for hypothesis in beam:
            for label in range(len(row)):
                new = self._extended(hypothesis, label, float(row[label]), b, t)
                key = new.text, new.last
                if new.score > -np.inf and (key not in best or new.score > best[key].score):
                    best[key] = new
        return sorted(best.values(), key=lambda h: (-h.score, h.text, h.last))[: self.config.beam_size]

    def _extended(self, old: Hypothesis, label: int, log_prob: float, b: int, t: int) -> Hypothesis:
        score, tokens, states, weight = old.score + log_prob, *old[3:], float(self.fusion.boosting_weights[b])
        if label == self.blank_id:
            return Hypothesis(score, old.text, label, tokens, states)
        if label == old.last:
            longer = tokens[-1]._replace(log_probs=(*tokens[-1].log_probs, log_prob))
            return Hypothesis(score, old.text, label, (*tokens[:-1], longer), states)
        lm, state = self.fusion.lm.advance(states[0], label)
        bonus, node = self.fusion.trees[self.fusion.tree_of[b]].advance(states[1], label)
        score += float(self.fusion.lm_weights[b]) * lm + (weight and weight * bonus)  # 0 * inf would be NaN
        token = Token(t, (log_prob,))
        return Hypothesis(score, (*old.text, label), label, (*tokens, token), (state, node))

    def _weights(self, b: int, hypothesis: Hypothesis, final: bool) -> list[float]:
        """Weighted final weights of LM and boosting tree."""
        automata = self.fusion.lm, self.fusion.trees[self.fusion.tree_of[b]]
        weights = self.fusion.lm_weights[b], self.fusion.boosting_weights[b]
        return [
            float(weight) * float(automaton.arrays.states["final_weight"][state])
            for automaton, weight, state in zip(automata, weights, hypothesis.states, strict=True)
            if final and weight > 0
        ]


class ToyBeam(Decoder[ToyConfig, NBest]):
    """CTC log-probs [B, T, V + 1] to token ids; the blank is column V."""

    def __init__(self, vocab_size: int, config: ToyConfig | None = None, fusion: Fusion | None = None):
        config = config or ToyConfig()
        check_kind("config", config, ToyConfig)
        super().__init__(config, fusion, FusionLabels(vocab_size))
        self.vocab_size = vocab_size

    def with_options(self, config: ToyConfig, fusion: Fusion) -> ToyBeam:
        return ToyBeam(self.vocab_size, config, fusion)

    def _check_inputs(self, inputs: torch.Tensor, batch: int | None) -> None:
        check_log_probs(inputs, batch=batch, columns=self.vocab_size + 1)

    def _cpu_engine(self, streams: Streams) -> ToyEngine:
        return ToyEngine(self.config, self.vocab_size, streams.fusion)

    def _results(self, streams, engine, rows, n_best, *, final) -> list[NBest]:
        return [
            NBest(tuple(self._path(h, streams.fusion, row, final) for h in found), int(engine.frames[row]))
            for row, found in zip(rows, engine.results(rows, n_best, final=final), strict=True)
        ]

    def _path(self, hypothesis: Hypothesis, fusion: BatchFusion, b: int, final: bool) -> Path:
        lm = replace(fusion.lm, start_state=int(fusion.lm_starts[b])).score(hypothesis.text, final=final)
        lm, weight = float(fusion.lm_weights[b]) * lm, float(fusion.boosting_weights[b])
        boosting = weight and weight * fusion.trees[fusion.tree_of[b]].score(hypothesis.text, final=final)
        return Path(
            tokens=np.array(hypothesis.text, np.int32),
            frames=np.array([token.frame for token in hypothesis.tokens], np.int32),
            repeats=np.array([len(token.log_probs) for token in hypothesis.tokens], np.int32),
            token_confidence=np.array([np.exp(token.log_probs).mean() for token in hypothesis.tokens], np.float32),
            score=hypothesis.score,
            parts=ScoreParts(hypothesis.score - lm - boosting, lm, boosting),
        )
