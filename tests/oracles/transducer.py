"""Transducer decoding by brute force, and the two searches once more in plain Python.

Texts are tuples, scores doubles, nothing is hashed, bounded or batched: too simple to be wrong. RNN-T
and TDT alike: an RNN-T knows the duration 0 only, and a blank moves on by at least one frame.
"""

import math
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nemo_gpu_decoding.fusion.fusion import Fusion


class Scorer:
    """Scores of labels and durations after a text, at a frame.

    Args:
        networks: `TransducerNetworks`.
        encoder_output: [T, D].
        fusion: LM and boosting tree.
        weighted_blank: blank_lm_score_mode is lm_weighted_full.
        ceiling: the blank's probability is clipped to this before its complement is taken.
    """

    def __init__(self, networks, encoder_output, fusion=None, *, weighted_blank=True, ceiling=0.99, temperature=1.0):
        self.networks = networks
        self.frames = encoder_output
        self.fusion = fusion or Fusion()
        self.ceiling = ceiling
        self.temperature = temperature
        self.blank = networks.vocab_size
        self.durations = tuple(networks.durations) or (0,)
        lm = 0.0 if self.fusion.lm is None else self.fusion.lm_weight
        boosting = 0.0 if self.fusion.boosting is None else self.fusion.boosting_weight
        self.alpha = (lm + boosting) if weighted_blank else 0.0
        self.state = lru_cache(maxsize=None)(self._state)
        self.rows = lru_cache(maxsize=None)(self._rows)

    def _state(self, text):
        if not text:
            return self.networks.start()
        _, before = self.state(text[:-1])
        return self.networks.predict(torch.tensor([text[-1]]), before)

    def _rows(self, text, frame):
        projected = self.networks.project_encoder(self.frames[frame : frame + 1])
        logits = self.networks.join(projected, self.state(text)[0])[0].double() / self.temperature
        labels = torch.log_softmax(logits[: self.blank + 1], -1).numpy()
        durations = torch.log_softmax(logits[self.blank + 1 :], -1).numpy()
        return labels, durations if self.networks.durations else np.zeros(1)

    def joint(self, text, frame):
        """Log-probs of labels and of durations, by the joint alone."""
        return self.rows(text, frame)

    def label(self, text, frame, label):
        """Score of a label: the joint's log-prob, LM and boosting, blank scoring."""
        labels, _ = self.rows(text, frame)
        if label == self.blank:
            return labels[label] * (1 + self.alpha)
        offset = self.alpha * math.log1p(-min(math.exp(labels[self.blank]), self.ceiling))
        return labels[label] + offset + self.fused(text, label)

    def fused(self, text, label):
        score = 0.0
        for automaton, weight in (
            (self.fusion.lm, self.fusion.lm_weight),
            (self.fusion.boosting, self.fusion.boosting_weight),
            (self.fusion.source_lm, -(self.fusion.source_lm_weight or 0.0)),
        ):
            if automaton is not None and weight != 0:
                whole = automaton.score((*text, label), final=False)
                score += weight * (whole - automaton.score(text, final=False))
        allowed = self.fusion.allowed
        return score if allowed is None or allowed.is_allowed[label] else score - allowed.price

    def advance(self, label, duration):
        """Frames that a label with a duration moves on."""
        return max(1, duration) if label == self.blank else duration

    def final(self, text):
        """Refunds of phrases that were not finished."""
        if self.fusion.boosting is None or self.fusion.boosting_weight == 0:
            return 0.0
        boosting = self.fusion.boosting
        return self.fusion.boosting_weight * (boosting.score(text) - boosting.score(text, final=False))


def brute_force(scorer, max_length):
    """{text: score}, summed over all alignments, of all texts of at most `max_length` tokens.

    Alignments that reach differently far beyond the end are not added up; the best reach counts.
    """
    length = len(scorer.frames)
    mass = defaultdict(lambda: -math.inf)
    mass[0, ()] = 0.0
    for frame in range(length):
        for size in range(max_length + 1):
            for (at, text), score in list(mass.items()):
                if at != frame or len(text) != size:
                    continue
                labels = [scorer.blank, *(range(scorer.blank) if size < max_length else ())]
                for label in labels:
                    for duration, log_prob in zip(scorer.durations, scorer.joint(text, frame)[1], strict=True):
                        new = text if label == scorer.blank else (*text, label)
                        key = frame + scorer.advance(label, duration), new
                        total = score + scorer.label(text, frame, label) + log_prob
                        mass[key] = np.logaddexp(mass[key], total)
    best = defaultdict(lambda: -math.inf)
    for (at, text), score in mass.items():
        if at >= length:
            best[text] = max(best[text], score + scorer.final(text))
    return {text: score for text, score in best.items() if score > -math.inf}


@dataclass(frozen=True)
class Hypothesis:
    text: tuple[int, ...]
    frame: int
    score: float
    symbols: int = 0
    open: bool = True
    starts: tuple[int, ...] = ()
    durations: tuple[int, ...] = ()

    def extended(self, scorer, label, duration, score):
        frame = self.frame + scorer.advance(label, duration)
        if label == scorer.blank:
            return replace(self, frame=frame, score=score, symbols=0)
        return replace(
            self,
            text=(*self.text, label),
            frame=frame,
            score=score,
            symbols=0 if duration else self.symbols + 1,
            starts=(*self.starts, self.frame),
            durations=(*self.durations, duration),
        )


def recombined(hypotheses):
    """Add up what is equal in text and frame; the better one lends its way."""
    groups = {}
    for hypothesis in sorted(hypotheses, key=lambda h: -h.score):
        key = hypothesis.text, hypothesis.frame
        if key in groups:
            total = np.logaddexp(groups[key].score, hypothesis.score)
            groups[key] = replace(groups[key], score=float(total))
        else:
            groups[key] = hypothesis
    return list(groups.values())


def best(hypotheses, count):
    return sorted((h for h in hypotheses if h.score > -math.inf), key=lambda h: -h.score)[:count]


def ranked(hypotheses, scorer, score_norm):
    """[(text, score, hypothesis)] with different texts, best first."""
    texts = {}
    for hypothesis in hypotheses:
        score = hypothesis.score + scorer.final(hypothesis.text)
        if hypothesis.text not in texts or score > texts[hypothesis.text][0]:
            texts[hypothesis.text] = score, hypothesis

    def rating(item):
        return item[1][0] / (len(item[0]) + 1) if score_norm else item[1][0]

    ordered = sorted(texts.items(), key=rating, reverse=True)
    return [(text, score, hypothesis) for text, (score, hypothesis) in ordered]


def alsd(scorer, *, beam_size, max_symbols=10, early=False, score_norm=True):
    """Alignment-length synchronous decoding [ALSD++/AES++]."""
    end = len(scorer.frames)
    beam = [Hypothesis((), 0, 0.0)]
    while any(hypothesis.frame < end for hypothesis in beam):
        candidates = []
        for hypothesis in beam:
            if hypothesis.frame >= end:
                candidates.append(hypothesis)
                continue
            labels, durations = scorer.joint(hypothesis.text, hypothesis.frame)
            if hypothesis.symbols >= max_symbols:
                longest = int(np.argmax(durations))
                blank = labels[scorer.blank] * (1 if early else 1 + scorer.alpha)
                candidates.append(
                    hypothesis.extended(
                        scorer, scorer.blank, scorer.durations[longest],
                        hypothesis.score + blank + durations[longest],
                    )
                )  # fmt: skip
                continue
            considered = range(scorer.blank + 1)
            if early:
                considered = sorted(considered, key=lambda v: -labels[v])[:beam_size]
            for label in considered:
                score = hypothesis.score + scorer.label(hypothesis.text, hypothesis.frame, label)
                for duration, log_prob in zip(scorer.durations, durations, strict=True):
                    candidates.append(hypothesis.extended(scorer, label, duration, score + log_prob))
        beam = recombined(best(candidates, beam_size))
    return ranked(beam, scorer, score_norm)


def aes(scorer, *, beam_size, num_steps=2, beta=2, gamma=2.3, early=False, score_norm=True):
    """Adaptive expansion search [ALSD++/AES++], as `transducer/aes.py` describes it."""
    beam = [Hypothesis((), 0, 0.0)]
    for frame in range(len(scorer.frames)):
        beam = [replace(hypothesis, open=hypothesis.frame == frame) for hypothesis in beam]
        if not any(hypothesis.open for hypothesis in beam):
            continue
        beam = _prefix_search(scorer, beam, frame)
        for _ in range(num_steps):
            if not any(hypothesis.open for hypothesis in beam):
                break
            pool = [hypothesis for hypothesis in beam if not hypothesis.open]
            for hypothesis in beam:
                if hypothesis.open:
                    expansions = _expansions(scorer, hypothesis, beam_size + beta, gamma, early)
                    pool += [new for new in expansions if not _counted(scorer, hypothesis, new, beam)]
            beam = best(recombined(pool), beam_size)
        beam = recombined([_with_blank(scorer, hypothesis) for hypothesis in beam])
    return ranked(beam, scorer, score_norm)


def _prefix_search(scorer, beam, frame):
    if 0 not in scorer.durations:
        return beam
    stay = scorer.durations.index(0)
    result = []
    for hypothesis in beam:
        score = hypothesis.score
        for prefix in beam:
            if hypothesis.open and prefix.open and hypothesis.text[:-1] == prefix.text != hypothesis.text:
                gain = scorer.label(prefix.text, frame, hypothesis.text[-1])
                duration = scorer.joint(prefix.text, frame)[1][stay]
                score = float(np.logaddexp(score, prefix.score + gain + duration))
        result.append(replace(hypothesis, score=score))
    return result


def _expansions(scorer, hypothesis, count, gamma, early):
    labels, durations = scorer.joint(hypothesis.text, hypothesis.frame)
    expansions = []
    for label in range(scorer.blank + 1):
        fused = scorer.label(hypothesis.text, hypothesis.frame, label)
        for duration, log_prob in zip(scorer.durations, durations, strict=True):
            new = hypothesis.extended(scorer, label, duration, hypothesis.score + fused + log_prob)
            new = replace(new, open=new.frame == hypothesis.frame)
            expansions.append(((labels[label] if early else fused) + log_prob, new))
    expansions.sort(key=lambda pair: -pair[0])
    return [new for rating, new in expansions[:count] if rating > expansions[0][0] - gamma]


def _counted(scorer, parent, new, beam):
    """Prefix search has counted a token in this frame that leads to a text of the beam."""
    if new.text == parent.text or new.frame > parent.frame:
        return False
    timed = bool(scorer.networks.durations)
    return any(o.text == new.text and (not timed or o.frame == new.frame) for o in beam)


def _with_blank(scorer, hypothesis):
    if not hypothesis.open:
        return hypothesis
    labels, durations = scorer.joint(hypothesis.text, hypothesis.frame)
    longest = int(np.argmax(durations))
    score = hypothesis.score + labels[scorer.blank] + durations[longest]
    return hypothesis.extended(scorer, scorer.blank, scorer.durations[longest], score)


PRECISIONS = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "autocast to bfloat16": (torch.bfloat16, True),
    "autocast to float16": (torch.float16, True),
}


@contextmanager
def precision(networks, name: str, device: str = "cpu"):
    """The networks in one of PRECISIONS: their weights changed to it for good, or autocast while inside."""
    dtype, autocast = PRECISIONS[name]
    if not autocast:
        for value in vars(networks).values():
            for module in value if isinstance(value, list) else [value]:
                if isinstance(module, nn.Module):
                    module.to(dtype)
    with torch.autocast(device, dtype, enabled=autocast):
        yield dtype


class PlainLSTMNetworks:
    """The networks of an `LSTMNetworks` by their formulas, one row at a time, in any precision.

    Every product and what is added to it is of type `dtype`, gates and cells are float32.
    """

    def __init__(self, networks, dtype) -> None:
        self._networks, self._dtype = networks, dtype
        self.vocab_size, self.durations = networks.vocab_size, networks.durations
        self.encoder_size = networks.encoder_size

    def evaluation(self):
        return nullcontext()

    def _linear(self, row, weight, bias=None):
        with torch.autocast("cpu", enabled=False):
            given = (None if part is None else part.to(self._dtype) for part in (row, weight, bias))
            return functional.linear(*given)

    def _by_rows(self, function, *parts):
        return torch.cat([function(*(part[i : i + 1] for part in parts)) for i in range(len(parts[0]))])

    def project_encoder(self, frames):
        layer = self._networks.encoder_projection
        return self._by_rows(lambda row: self._linear(row, layer.weight, layer.bias), frames)

    def start(self):
        lstm = self._networks.lstm
        zeros = torch.zeros(1, lstm.num_layers, lstm.hidden_size)
        return self.predict(torch.tensor([self.vocab_size]), (zeros.to(self._dtype), zeros))

    def predict(self, labels, state):
        rows = [self._predicted(*(part[i] for part in (labels, *state))) for i in range(len(labels))]
        output, hidden, cell = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return output, (hidden, cell)

    def _predicted(self, label, hidden, cell):
        networks, layers = self._networks, []
        value = networks.embedding.weight[label]
        for layer, (weight, recurrent, *biases) in enumerate(networks.lstm.all_weights):
            gates = self._linear(value, weight, sum(biases)).float() + self._linear(hidden[layer], recurrent).float()
            let_in, keep, new, let_out = gates.chunk(4)
            new_cell = torch.sigmoid(keep) * cell[layer] + torch.sigmoid(let_in) * torch.tanh(new)
            value = (torch.sigmoid(let_out) * torch.tanh(new_cell)).to(self._dtype)
            layers.append((value, new_cell))
        layer = networks.prediction_projection
        return self._linear(value, layer.weight, layer.bias), *map(torch.stack, zip(*layers, strict=True))

    def join(self, frames, predictions):
        activation, last = self._networks.output[0], self._networks.output[-1]
        return self._by_rows(
            lambda frame, row: self._linear(activation(frame + row), last.weight, last.bias), frames, predictions
        )
