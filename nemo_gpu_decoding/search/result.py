"""Define the results of all decoders, with NumPy arrays and plain numbers: n-best lists, phrases, alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.words import single_spaced

if TYPE_CHECKING:
    from nemo_gpu_decoding.fusion.batch import Rules
    from nemo_gpu_decoding.fusion.grammar import Grammar
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice

S = TypeVar("S", bound="Path")
T = TypeVar("T")


def new_frozen(kind: type[T], **values: Any) -> T:
    """Return an instance of a frozen dataclass with these field values, and defaults for the others.

    The function bypasses the slow `__init__` of frozen dataclasses, which dominates the time per hypothesis.
    """
    result = object.__new__(kind)
    result.__dict__.update(values)
    return result


@dataclass(frozen=True)
class ScoreParts:
    """The parts of a hypothesis' score, natural log. The fields of `ScoreParts` add up to `Path.score`."""

    acoustic: float
    lm: float = 0.0  # lm_weight * log P_LM - source_lm_weight * log P_source, final weights included
    boosting: float = 0.0  # boosting_weight * bonus, less the prices of tokens that are not allowed
    insertion: float = 0.0  # beam_beta * number of tokens
    second_pass: float = 0.0  # of `rescored` n-best lists


@dataclass(frozen=True)
class Path:
    """A hypothesis of an utterance, with n tokens over T decoded frames."""

    tokens: np.ndarray  # [n] int32 token ids, no blanks
    frames: np.ndarray  # [n] int32, frame at which each token starts (0 = first frame of the stream)
    repeats: np.ndarray  # [n] int32, number of consecutive frames that emit the token, >= 1
    token_confidence: np.ndarray  # [n] float32 in [0, 1]: mean posterior of the token over these frames
    score: float
    parts: ScoreParts
    # [T] int32 label per frame, blanks included, if the config has `alignments`. Transducers: [m] for m steps, as
    # several labels may share a frame
    alignment: np.ndarray | None = None
    alignment_log_probs: np.ndarray | None = None  # float32 log-posterior of these labels
    # transducers only
    alignment_frames: np.ndarray | None = None  # [m] int32, frame of every label in `alignment`
    durations: np.ndarray | None = None  # [n] int32, frames moved on with each token (TDT)
    outside_share: float | None = None  # of tokens that are not allowed, 0 .. 1; None: all tokens are

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self: S, n: int) -> S:
        """Return the path after its first n tokens, without alignment.

        A word path keeps the words that end after these tokens; the words' token numbers count from the start of the
        stream. A client of partial results reads the new tokens only:

            new = nbest.best.after(shown)  # shown: nbest.committed of the partial result before
        """
        return replace(
            self,
            tokens=self.tokens[n:],
            frames=self.frames[n:],
            repeats=self.repeats[n:],
            token_confidence=self.token_confidence[n:],
            durations=None if self.durations is None else self.durations[n:],
            alignment=None,
            alignment_log_probs=None,
            alignment_frames=None,
        )


P = TypeVar("P", bound=Path, covariant=True)


class FoundPhrase(NamedTuple):
    """A boosted phrase that occurs in a path."""

    text: str  # as in the list of phrases, also where an alias of it was found
    first_token: int
    end_token: int  # one past its last token
    start_frame: int
    end_frame: int  # one past the last frame of its last token
    evidence: float  # smallest posterior of its tokens, 0 .. 1


class Work(NamedTuple):
    """The counters that paged_biglm adds up over all frames of an utterance.

    The length of the audio chunks affects `query_hits` only. `look_ups` and `groups` do not depend on the order of
    work. The last three counters are 0 unless a GPU reads the LMs from host memory (`placement: paged`).
    These three depend on the size of the GPU's arc cache, on earlier decoding, and on the order of the threads.
    """

    look_ups: int  # words for which the LMs were queried
    query_hits: int  # queries that the LM query cache answered
    arc_visits: int  # arcs of the graph that were looked at
    groups: int  # groups of tokens in one graph state of which an arc may stay within the beam
    expanded: int  # LM contexts of groups that were expanded
    frames: int
    cache_hits: int = 0  # arcs of an LM that were in the GPU's cache
    cache_misses: int = 0  # arcs that were read over the bus
    bus_bytes: int = 0  # bytes that these reads transferred

    @property
    def cache_hit_rate(self) -> float:
        """Return the share of arcs that were in the GPU's cache, 0 .. 1; NaN if none came from the host's memory."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else float("nan")


@dataclass(frozen=True)
class NBest(Sequence[P]):
    """The hypotheses of one utterance, best first; there is at least one.

    No two hypotheses have the same tokens; in word graphs, no two have the same words. Different tokens may spell the
    same text, see `distinct`. Fields that a search does not provide are None.
    """

    paths: tuple[P, ...]
    num_frames: int = 0
    notes: tuple[str, ...] = ()  # messages for the user, e.g. overflow of a limit
    lattice: Lattice | None = None  # of a word-graph search with `lattice` in its config
    # Partial results of word-graph searches: score of the best hypothesis less that of the best one that may end here;
    # inf if none may end. Endpointing uses it.
    relative_cost: float | None = None
    work: Work | None = None  # of paged_biglm
    # With a grammar, of an utterance that has ended: whether a sentence fits. If not, the only path has no tokens
    in_grammar: bool | None = None
    # Partial results: number of first tokens of the best hypothesis that all live hypotheses share, so they no longer
    # change (alternatives in a lattice may differ). It never decreases in a stream.
    committed: int | None = None
    # Boosted phrases of the best hypothesis. Partial results have them where phrases have an `ac_threshold`; never for
    # trees that NeMo made.
    phrases: tuple[FoundPhrase, ...] = ()
    aliases: Aliases | None = None  # of the utterance's phrases; `texts` replaces them

    @property
    def best(self) -> P:
        return self.paths[0]

    def phrases_of(self, path: Path) -> tuple[FoundPhrase, ...]:
        """Return the boosted phrases of the best path, or () for any other path."""
        return self.phrases if path is self.best else ()

    def texts(self, text_of: Callable[[Any], str]) -> list[str]:
        """Return the text of each path, with aliases of phrases replaced.

        Args:
            text_of: the text of a path: `lambda path: vocabulary.text(path.tokens)`, in word graphs
                `lambda path: path.text`.
        """
        texts = map(text_of, self.paths)
        return list(texts if self.aliases is None else map(self.aliases.written, texts))

    def distinct(self, text_of: Callable[[Any], str], n: int) -> NBest[P]:
        """Return the n best hypotheses with different texts; fewer if there are fewer texts.

        Texts that differ only in spaces are equal. The best hypothesis of each text is returned unchanged: scores of
        equal texts are not added.
        """
        if n == 1 or len(self.paths) == 1:
            return self if len(self.paths) == 1 else replace(self, paths=self.paths[:1])
        path_of: dict[str, P] = {}
        for path in self.paths:
            text = text_of(path)
            text = text if self.aliases is None else self.aliases.written(text)
            path_of.setdefault(single_spaced(text), path)
            if len(path_of) == n:
                break
        return replace(self, paths=tuple(path_of.values()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index]

    def __iter__(self) -> Iterator[P]:
        return iter(self.paths)


N = TypeVar("N", bound=NBest[Any])


def with_rules(results: Sequence[N], rules: Sequence[Rules], blank_id: int) -> list[N]:
    """Return the results of ended utterances after applying their grammars, with `outside_share` of language locks."""
    results = [_by_grammar(nbest, rule.grammar, blank_id) for nbest, rule in zip(results, rules, strict=True)]
    for nbest, rule in zip(results, rules, strict=True):
        if rule.allowed is not None:
            for path in nbest.paths:  # in place: no other result has the same paths
                vars(path)["outside_share"] = rule.allowed.outside_share(path.tokens, blank_id)
    return results


def _by_grammar(nbest: N, grammar: Grammar | None, blank_id: int) -> N:
    """Return the hypotheses of an ended utterance that are sentences of its grammar.

    If the best hypothesis is no sentence, the only hypothesis left has no tokens.
    """
    if grammar is None:
        return nbest
    is_sentence = [grammar.accepts(path.tokens, blank_id) for path in nbest.paths]
    paths: tuple[Any, ...] = tuple(path for path, is_kept in zip(nbest.paths, is_sentence, strict=True) if is_kept)
    if not is_sentence[0]:
        paths = (_without_tokens(nbest.best, blank_id),)
    return replace(nbest, paths=paths, in_grammar=is_sentence[0], notes=nbest.notes if is_sentence[0] else ())


def _without_tokens(path: Path, blank_id: int) -> Path:
    """Return the path as if all of its labels were blanks; its score is the same."""
    alignment = None if path.alignment is None else np.full_like(path.alignment, blank_id)
    kept = {name: getattr(path, name) for name in ("alignment_log_probs", "alignment_frames")}
    parts = path.parts
    if not np.isfinite(parts.boosting):  # transducers: an end that is forbidden
        parts = ScoreParts(path.score - parts.lm, parts.lm)
    return replace(path.after(len(path)), parts=parts, alignment=alignment, **kept)


# ------------------------------------------------------------------------------- word alternatives


class WordOption(NamedTuple):
    """One of the alternative words at a place."""

    word: str  # "": no word
    posterior: float  # in [0, 1]


class Place(NamedTuple):
    """The alternative words at a place, most probable first. Times are in frames, or in seconds in transcripts."""

    word_index: int | None  # of the transcript's word; None: between two words
    start: float
    end: float
    alternatives: tuple[WordOption, ...]


def places_in_seconds(places: Sequence[Place], words: Sequence[Any], frame_seconds: float) -> tuple[Place, ...]:
    """Return places with the times of the transcript's words, which have `start` and `end` in seconds.

    If the transcript replaces words (aliases), a place has the index of the transcript's word at its time.
    """
    of_words = [place for place in places if place.word_index is not None]
    offset = words[0].start - of_words[0].start * frame_seconds if words and of_words else 0.0
    timed = []
    for place in places:
        index, start, end = place.word_index, place.start * frame_seconds + offset, place.end * frame_seconds + offset
        if index is not None and len(of_words) == len(words):
            start, end = words[index].start, words[index].end
        elif index is not None and words:
            index = min(range(len(words)), key=lambda n: abs(words[n].start + words[n].end - start - end))
        timed.append(Place(index, round(start, 3), round(end, 3), place.alternatives))
    return tuple(timed)


def places_as_json(places: Sequence[Place]) -> list[dict[str, Any]]:
    """Return places as JSON objects, for transcripts and messages."""
    return [
        {**place._asdict(), "alternatives": [option._asdict() for option in place.alternatives]} for place in places
    ]
