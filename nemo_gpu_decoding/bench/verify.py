"""Checks that come before any timing: a fast decoder that gives other results has not won anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nemo_gpu_decoding.bench.cases import Check
from nemo_gpu_decoding.bench.large_lm.strategies import EagerSearch
from nemo_gpu_decoding.bench.large_lm.verify import equal_to_eager
from nemo_gpu_decoding.bench.peers.base import Output, Peer, ScoringPeer
from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder
from nemo_gpu_decoding.bench.peers.nemo_transducer import NemoTransducerBeam
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Task, Utterances
from nemo_gpu_decoding.bench.transducer.verify import equal_to_nemo
from nemo_gpu_decoding.bench.word_graph.verify import equal_to_kaldi
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.search.result import Path

WER_TOLERANCE = 0.5  # percent, between decoders that prune the same graph each in its way
SCORE_TOLERANCE = 1e-3  # natural log; some hundred additions in float32 against one in double


@dataclass(frozen=True)
class Errors:
    """Percent of words and of tokens that are wrong; no token errors for decoders that give words."""

    wer: float
    ter: float | None

    @classmethod
    def of(cls, task: Utterances, outputs: list[Output]) -> Errors:
        texts = [o if isinstance(o, str) else task.vocabulary.text(o) for o in outputs]
        wer = 100 * word_errors(task.texts, texts).wer
        if any(isinstance(output, str) for output in outputs):
            return cls(wer, None)
        spelled = [" ".join(map(str, tokens)) for tokens in task.tokens]
        return cls(wer, 100 * word_errors(spelled, [" ".join(map(str, o)) for o in outputs]).wer)


@dataclass(frozen=True)
class Verdict:
    verified: bool
    how: str


def verify(
    check: Check, task: Utterances, theirs: Peer, ours: Strategy, errors: tuple[Errors, Errors]
) -> Verdict:
    """Do the results of our decoder hold against the peer's?

    Args:
        errors: of the peer's and of our outputs on the whole batch.
    """
    if check is Check.EQUAL and isinstance(theirs, NemoTransducerBeam):
        return Verdict(*equal_to_nemo(task, theirs, ours))
    if check is Check.WORDS:
        if isinstance(theirs, EagerSearch):
            return Verdict(*equal_to_eager(task, theirs, ours))
        assert isinstance(theirs, KaldiDecoder)
        return Verdict(*equal_to_kaldi(task, theirs, ours))
    peer_wer, our_wer = errors[0].wer, errors[1].wer
    figures = f"{check.value}: {our_wer:.2f} % and {peer_wer:.2f} %"
    if check is Check.SAME_WER:
        return Verdict(abs(our_wer - peer_wer) <= WER_TOLERANCE, figures)
    if check is not Check.WER:
        assert isinstance(task, Task)  # the checks below are about CTC
        return _equal(task, theirs, ours) if check is Check.EQUAL else _scores(task, ours)
    return Verdict(our_wer <= peer_wer, figures)


def _equal(task: Task, theirs: Peer, ours: Strategy) -> Verdict:
    """Our batch against the peer's utterances alone, token by token.

    Half-precision emissions hold exact ties, and which of two equally good hypotheses comes first is
    the decoder's own affair. So other tokens pass if their true score is the peer's.
    """
    assert isinstance(theirs, ScoringPeer)
    expected = theirs.hypotheses_alone(task.log_probs, task.lengths)
    paths = ours.paths(task.log_probs, task.lengths)
    same = tied = 0
    for b, (their, path) in enumerate(zip(expected, paths, strict=True)):
        if path.tokens.tolist() == their.tokens:
            same += 1
        else:
            score = _rescored(path, task.log_probs[b, : int(task.lengths[b])], ours)
            tied += abs(score - their.score) <= SCORE_TOLERANCE
    also = f" and {tied} tied in score" if tied else ""
    how = f"{Check.EQUAL.value}: {same}{also} of {len(paths)}, the peer's utterances decoded alone"
    return Verdict(same + tied == len(paths), how)


def _scores(task: Task, ours: Strategy) -> Verdict:
    """Recompute every score from log-probs, LM and boosting tree."""
    paths = ours.paths(task.log_probs, task.lengths)
    differences = [
        abs(_rescored(path, log_probs[:length], ours) - path.score)
        for path, log_probs, length in zip(paths, task.log_probs, task.lengths.tolist(), strict=True)
    ]
    right = sum(difference <= SCORE_TOLERANCE for difference in differences)
    largest = f"{max(differences):.1e}"
    how = f"{Check.SCORES.value}: {right} of {len(paths)} agree, largest difference {largest}"
    return Verdict(right == len(paths), how)


def _rescored(path: Path, log_probs: torch.Tensor, ours: Strategy) -> float:
    """The score of a path from first principles; log_probs [T, V + 1]."""
    fusion, blank = ours.fusion, log_probs.shape[1] - 1
    labels = np.full(len(log_probs), blank)
    for token, frame, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
        labels[frame : frame + repeats] = token
    score = float(log_probs.double().cpu().numpy()[np.arange(len(labels)), labels].sum())
    if fusion.lm:
        score += fusion.lm_weight * fusion.lm.score(path.tokens.tolist()) + ours.options.beam_beta * len(
            path
        )
    if fusion.boosting:
        score += fusion.boosting_weight * fusion.boosting.score(path.tokens.tolist())
    return score
