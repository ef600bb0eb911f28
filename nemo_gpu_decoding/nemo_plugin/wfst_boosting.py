"""Phrases of a decoding config, or of one utterance, as boosting automata over a graph's words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, read_phrases
from nemo_gpu_decoding.fusion.phrase_tree import token_scores
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.cuda_wfst.boosting import build_word_boosting
from nemo_gpu_decoding.vocabulary import letter_cases

_MOST_CASES = 64  # ways to write one phrase, where the graph has its words in several letter cases


def configured_phrases(config: BoostingConfig) -> list[Phrase]:
    """The phrases that a `boosting_tree` section names; none if it names none.

    Raises:
        ValueError: they come from a file and from lists, or a file is malformed.
    """
    lists = [*(config.key_phrases_list or ()), *(config.key_phrase_items_list or ())]
    if config.key_phrases_file is None:
        return as_phrases(lists)
    if lists:
        raise ValueError(
            "wfst.boosting_tree has key_phrases_file and lists of phrases, expected one source"
        )
    return read_phrases(config.key_phrases_file)


def as_phrases(items: Sequence[str | Phrase]) -> list[Phrase]:
    """Texts and phrases, all as phrases."""
    return [item if isinstance(item, Phrase) else Phrase(item) for item in items]


def words_of(phrases: Sequence[Phrase]) -> list[str]:
    """All words of some phrases, as they are written there."""
    return list(dict.fromkeys(word for phrase in phrases for word in phrase.text.split()))


def word_boosting(
    phrases: Sequence[Phrase], config: BoostingConfig, graph: WordGraph, *, missing: str, name: str
) -> BackoffAutomaton:
    """The automaton of some phrases, with NeMo's formula for bonuses applied to words.

    Word n of a phrase earns context_score (n = 1), else context_score * depth_scaling + log(n), or
    context_score with uniform_weights; with score_per_phrase the whole phrase earns that. The total is
    shared out evenly among the words of the phrase.

    Args:
        missing: "error", or "skip": phrases with words that the graph lacks are named in a warning.

    Raises:
        ValueError: see `build_word_boosting`.
    """
    bonuses: dict[str, float] = {}
    for phrase in phrases:
        for text in _spellings(phrase.text, config, graph):
            bonuses[text] = max(_bonus(phrase, config), bonuses.get(text, 0.0))
    worth = {text: bonus for text, bonus in bonuses.items() if bonus > 0}  # a weight may be 0
    if not worth:
        raise ValueError(f"{name} has no phrase with a bonus > 0, expected at least one")
    lacking = [text for text in worth if not set(text.split()) <= graph.word_ids.keys()]
    if lacking and missing == "error":
        raise ValueError(
            f"{name}: the graph has not all words of {', '.join(map(repr, lacking[:5]))}; "
            "wfst.added_words adds words to a graph that is built from wfst.arpa_lm_path"
        )
    return build_word_boosting(worth, graph, missing=missing, name=name)


def _bonus(phrase: Phrase, config: BoostingConfig) -> float:
    """What the whole phrase earns, natural log."""
    weight = 1.0 if phrase.weight is None else phrase.weight
    if config.score_per_phrase:
        return weight * config.score_per_phrase
    length = len(phrase.text.split())
    scores = token_scores(length, config.context_score, config.depth_scaling, config.uniform_weights)
    return weight * float(scores.sum())


def _spellings(text: str, config: BoostingConfig, graph: WordGraph) -> list[str]:
    """The phrase as written; ignoring case, with each word in the cases that the graph has it in."""
    forms = [[word] for word in text.split()]
    if config.ignore_case:
        known = [[case for case in letter_cases(word) if case in graph.word_ids] for (word,) in forms]
        forms = [found or own for found, own in zip(known, forms, strict=True)]
    return [" ".join(words) for words in islice(product(*forms), _MOST_CASES)]
