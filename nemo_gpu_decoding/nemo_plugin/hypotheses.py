"""Our results in NeMo's form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

from nemo_gpu_decoding.search.result import Path, ScoreParts, Work

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice
    from nemo_gpu_decoding.search.word_graph.result import Word


@dataclass
class BeamHypothesis(Hypothesis):
    """NeMo's `Hypothesis` and what a beam search knows beyond it. n tokens.

    `y_sequence` is [n] int64 on the CPU, `timestamp` the start frame of each token, `score` a float
    (natural log), `length` the number of frames decoded.
    """

    token_frames: list[int] = field(default_factory=list)  # [n] start frames; `timestamp` is rewritten
    token_repeats: list[int] = field(default_factory=list)  # [n] frames that emit the token, >= 1
    score_parts: ScoreParts | None = None  # the score by source: acoustic, LM, boosting, insertion
    error: str = ""  # why the utterance was not decoded; it has no tokens then

    @property
    def non_blank_frame_confidence(self) -> list[float]:
        """Confidence of the frames that emit a token, in order; NeMo aggregates it per token."""
        if self.frame_confidence is None:
            return []
        return [
            self.frame_confidence[frame]
            for start, repeats in zip(self.token_frames, self.token_repeats, strict=True)
            for frame in range(start, start + repeats)
        ]


@dataclass
class WordHypothesis(BeamHypothesis):
    """A hypothesis whose words come from a word graph, not from its tokens.

    The `confidence` of a word is its posterior in the lattice; None where no lattice was kept (see
    `decoding_mode`). NeMo's `word_confidence` stays what NeMo's `confidence_cfg` says.
    """

    words: tuple[Word, ...] = ()
    lattice: Lattice | None = None  # with decoding_mode lattice
    work: Work | None = None  # what the search of the utterance had to do, of paged_biglm


@dataclass
class TransducerHypothesis(BeamHypothesis):
    """A hypothesis of a transducer search; `token_duration` is what a TDT model moved on with each token
    (frames)."""

    step_confidence: list[Any] = field(default_factory=list)  # [n] where a token is emitted, by NeMo's method

    @property
    def non_blank_frame_confidence(self) -> list[Any]:
        """Confidence of the steps that emit a token, in order; NeMo takes it for that of the tokens."""
        return self.step_confidence


H = TypeVar("H", bound=BeamHypothesis)


def from_path(path: Path, num_frames: int, kind: type[H], **more: Any) -> H:
    """One hypothesis of a search; `more` are fields that only its `kind` has."""
    frames = path.frames.tolist()
    return kind(
        score=float(path.score),
        y_sequence=torch.from_numpy(path.tokens.astype(np.int64)),
        timestamp=list(frames),
        length=num_frames,
        token_frames=frames,
        token_repeats=path.repeats.tolist(),
        score_parts=path.parts,
        **more,
    )


def from_labels(labels: np.ndarray, blank_id: int) -> BeamHypothesis:
    """The collapsed form of a frame-by-frame labelling [T]; its score is -1 as NeMo's greedy has it."""
    starts = np.flatnonzero(np.diff(labels, prepend=-1))  # where a run of equal labels begins
    runs = np.diff(starts, append=len(labels))
    emits = labels[starts] != blank_id
    frames = starts[emits].tolist()
    return BeamHypothesis(
        score=-1.0,
        y_sequence=torch.from_numpy(labels[starts][emits].astype(np.int64)),
        timestamp=list(frames),
        length=len(labels),
        token_frames=frames,
        token_repeats=runs[emits].tolist(),
    )


class NBestList(list):
    """The hypotheses of one utterance, best first.

    NeMo's n-best lists are plain lists; yet some of its code takes them for a hypothesis: the WER
    metric logs `.text`, and `transcribe(return_hypotheses=True)` sets `.y_sequence` to the log-probs
    and reads `.alignments`.
    """

    y_sequence: Any = None  # [T, V + 1] log-probs, once `transcribe` has set them
    alignments: Any = None

    @property
    def text(self) -> str:
        return self[0].text

    @property
    def score(self) -> float:
        return self[0].score


class TimedNBestList(NBestList, Hypothesis):
    """An n-best list with timestamps.

    `transcribe(timestamps=True)` converts frames to seconds, for instances of `Hypothesis` only and in
    place. Therefore this list is one, and its `timestamp` shows NeMo the entries of all hypotheses;
    times are to be read from the hypotheses, as `nbest[0].timestamp["word"]`.
    """

    @property
    def timestamp(self) -> dict[str, list]:
        levels = [level for level in self[0].timestamp if level != "timestep"]
        return {level: [entry for hyp in self for entry in hyp.timestamp[level]] for level in levels}


def restore_order(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in for `restore_transcription_order`, which sorts transcripts as the manifest is sorted.

    It takes n-best lists [utterance][rank] for the pair of lists that `transcribe` once returned, and ends with an
    IndexError or with candidates beside utterances that are not theirs. (`presort_manifest` of NeMo's scripts.)
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    transcriptions = call.arguments["transcriptions"]
    if not isinstance(transcriptions, list) or not transcriptions or not isinstance(transcriptions[0], list):
        return wrapped(*args, **kwargs)
    call.arguments["transcriptions"] = list(range(len(transcriptions)))
    return [transcriptions[row] for row in wrapped(*call.args, **call.kwargs)]


def write_lists(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in for `write_transcription`, which takes a list with timestamps for a hypothesis."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    entries = call.arguments["transcriptions"]
    call.arguments["transcriptions"] = [list(e) if isinstance(e, TimedNBestList) else e for e in entries]
    return wrapped(*call.args, **call.kwargs)
