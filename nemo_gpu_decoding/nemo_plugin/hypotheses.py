"""Convert paths of a search to NeMo's `Hypothesis` and n-best lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import StreamState
from nemo_gpu_decoding.search.result import FoundPhrase, Path, Place, ScoreParts, Work

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice
    from nemo_gpu_decoding.search.word_graph.result import GraphWord


@dataclass
class BeamHypothesis(Hypothesis):
    """NeMo's `Hypothesis` of n tokens, with additional fields for results of a beam search.

    `y_sequence` is [n] int64 on the CPU, `timestamp` the start frame of each token, `score` a float
    (natural log), `length` the number of frames decoded.
    """

    token_frames: list[int] = field(default_factory=list)  # [n] start frames; `timestamp` is rewritten
    token_repeats: list[int] = field(default_factory=list)  # [n] frames that emit the token, >= 1
    score_parts: ScoreParts | None = None  # the score by source: acoustic, LM, boosting, insertion
    phrases: tuple[FoundPhrase, ...] = ()  # boosted phrases, with their evidence; of the best hypothesis only
    outside_share: float | None = None  # of tokens that are not allowed, 0 .. 1; None: all tokens are
    in_grammar: bool | None = None  # False: no sentence of the grammar fits, and there are no tokens; None: no grammar
    error: str = ""  # why the utterance was not decoded, without tokens; "": decoded
    aliases: Aliases | None = None  # of the phrases; replaced in text, words and segments
    # computes `word_alternatives`; of the best hypothesis of an n-best list or lattice
    find_alternatives: Callable[[], tuple[Place, ...]] | None = field(default=None, repr=False, compare=False)

    @property
    def word_alternatives(self) -> tuple[Place, ...]:
        """Return the confusion network of the utterance with times in frames, or () without alternatives."""
        return () if self.find_alternatives is None else self.find_alternatives()

    @property
    def non_blank_frame_confidence(self) -> list[float]:
        """Return the confidence of each non-blank frame; NeMo aggregates the values per token."""
        if self.frame_confidence is None:
            return []
        return [
            self.frame_confidence[frame]
            for start, repeats in zip(self.token_frames, self.token_repeats, strict=True)
            for frame in range(start, start + repeats)
        ]


@dataclass
class WordHypothesis(BeamHypothesis):
    """NeMo's `Hypothesis` from a search in a word graph, with words and their frames.

    The `posterior` of a word is None without a lattice (see `decoding_mode`).
    NeMo's `confidence_cfg` still defines `word_confidence`.
    """

    words: tuple[GraphWord, ...] = ()
    lattice: Lattice | None = None  # with decoding_mode lattice
    work: Work | None = None  # counters of the search, for paged_biglm


@dataclass
class TransducerHypothesis(BeamHypothesis):
    """NeMo's `Hypothesis` from a transducer search; `token_duration` is the TDT duration per token in frames."""

    step_confidence: list[Any] = field(default_factory=list)  # [n] at each token, by NeMo's method

    @property
    def non_blank_frame_confidence(self) -> list[Any]:
        """Return the confidence of each non-blank step; NeMo uses the values as confidence of tokens."""
        return self.step_confidence


H = TypeVar("H", bound=BeamHypothesis)


def from_path(path: Path, state: StreamState, kind: type[H], **more: Any) -> H:
    """Convert a path in the result `state.nbest` to a hypothesis of class `kind` with `more` fields."""
    frames, nbest = path.frames.tolist(), state.nbest
    return kind(
        score=float(path.score),
        y_sequence=torch.from_numpy(path.tokens.astype(np.int64)),
        timestamp=list(frames),
        length=nbest.num_frames,
        token_frames=frames,
        token_repeats=path.repeats.tolist(),
        score_parts=path.parts,
        outside_share=path.outside_share,
        in_grammar=nbest.in_grammar,
        aliases=nbest.aliases,
        phrases=nbest.phrases_of(path),
        error=str(state.error or ""),
        **more,
    )


def from_labels(labels: np.ndarray, blank_id: int) -> BeamHypothesis:
    """Collapse frame labels [T] to tokens; return a hypothesis with score -1, as NeMo's greedy decoding does."""
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
    """The n-best list of one utterance, best hypothesis first, with fields of a single hypothesis.

    NeMo's n-best lists have no fields, but NeMo's code reads fields of a hypothesis: the WER metric logs `.text`, and
    `transcribe(return_hypotheses=True)` sets `.y_sequence` to the log-probs and reads `.alignments`.
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
    """An n-best list whose hypotheses have timestamps.

    `transcribe(timestamps=True)` converts frames to seconds in place, for instances of `Hypothesis` only. Therefore
    this list is a `Hypothesis`, and its `timestamp` has the entries of all hypotheses. Read the times from
    the hypotheses, such as `nbest[0].timestamp["word"]`.
    """

    @property
    def timestamp(self) -> dict[str, list]:
        levels = [level for level in self[0].timestamp if level != "timestep"]
        return {level: [entry for hyp in self for entry in hyp.timestamp[level]] for level in levels}


def restore_order(wrapped: Callable[..., Any], _: Any, call: BoundArguments) -> Any:
    """Restore the order of the manifest (`presort_manifest`) in place of NeMo's `restore_transcription_order`.

    NeMo's function treats n-best lists [utterance][rank] as the pair of lists that `transcribe` returned in
    older versions. NeMo then raises an IndexError or assigns hypotheses to wrong utterances.
    """
    transcriptions = call.arguments["transcriptions"]
    if not isinstance(transcriptions, list) or not transcriptions or not isinstance(transcriptions[0], list):
        return wrapped(*call.args, **call.kwargs)
    call.arguments["transcriptions"] = list(range(len(transcriptions)))
    return [transcriptions[row] for row in wrapped(*call.args, **call.kwargs)]


def write_lists(wrapped: Callable[..., Any], _: Any, call: BoundArguments) -> Any:
    """Write transcripts in place of NeMo's `write_transcription`, which mistakes timed n-best lists for hypotheses."""
    entries = call.arguments["transcriptions"]
    call.arguments["transcriptions"] = [list(e) if isinstance(e, TimedNBestList) else e for e in entries]
    return wrapped(*call.args, **call.kwargs)
