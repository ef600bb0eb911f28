"""Boost words and phrases of words in a word graph, per utterance [CUDA-WFST].

A phrase list becomes a `BackoffAutomaton` over the graph's word labels. The automaton's state is part of a search
token's key. Phrases of a single word need one state only, so they add no search tokens. The bonus of a word applies
when the graph emits the word, before pruning. The bonus should be below half the beam. With a larger bonus, the search
prunes hypotheses without the bonus too early.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from numbers import Real

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_kind, leave_out, warn_once
from nemo_gpu_decoding.fusion import phrases as phrase_lists
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, BoostingTree, PhraseTable
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence, build_context_graph, token_scores
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.unknown_words import Speller
from nemo_gpu_decoding.vocabulary import OTHER_CASE, Vocabulary, spellings_of

_MOST_CASES = 64  # limit on letter-case variants of one phrase


def configured_phrases(config: BoostingConfig) -> list[phrase_lists.Phrase]:
    """Return the phrases that a `boosting_tree` section names, or [] if it names none."""
    lists = list(map(phrase_lists.as_phrase, config.listed))
    if config.key_phrases_file is None:
        return phrase_lists.without_repetitions(lists, "phrases") if lists else []
    if lists:
        raise ValueError("wfst.boosting_tree has key_phrases_file and lists of phrases, expected one source")
    return phrase_lists.read_phrases(config.key_phrases_file)


def words_of(phrases: Sequence[phrase_lists.Phrase]) -> list[str]:
    """Return all words of phrases, as written, without phrases of negative weight."""
    boosted = [phrase for phrase in phrases if phrase_lists.weight_of(phrase) >= 0]
    return list(dict.fromkeys(word for phrase in boosted for word in phrase.text.split()))


def word_boosting(
    phrases: Sequence[phrase_lists.Phrase],
    config: BoostingConfig,
    graph: WordGraph,
    *,
    name: str,
    speller: Speller | None = None,
    vocabulary: Vocabulary | None = None,
) -> BackoffAutomaton:
    """Return the automaton of phrases, with NeMo's formula of bonuses applied to words.

    The bonus of word n is context_score for n = 1 or with uniform_weights, else context_score * depth_scaling +
    log(n). With score_per_phrase, the whole phrase has this bonus. The words of a phrase share its bonus equally.
    Phrases that the search cannot find are left out, with a warning.

    Args:
        speller: spells words that the graph lacks, see `build_word_boosting`.
        vocabulary: if given, a phrase earns the bonus of its tokens, as in a search over tokens.
    """
    aliases = phrase_lists.aliases_of(phrases, name, config.is_case_ignored)
    bonuses: dict[str, float] = {}
    for phrase in phrase_lists.spelled_phrases(phrases, lambda phrase: _is_known(phrase, config, graph, speller)):
        for text in _spellings(phrase.text, config, graph):
            bonus = _bonus(phrase, config, vocabulary)
            bonuses[text] = max(bonus, bonuses.get(text, bonus))
    worth = {text: bonus for text, bonus in bonuses.items() if bonus != 0}  # a weight may be 0
    if not worth:
        raise ValueError(f"{name} has no phrase with a bonus other than 0, expected at least one")
    faults = {text: fault for text in worth if (fault := _fault(text, graph, speller))}
    leave_out(name, list(faults.values()), len(worth) - len(faults))
    worth = {text: bonus for text, bonus in worth.items() if text not in faults}
    tree = build_word_boosting(worth, graph, name=name, speller=speller)
    table = tree.table._replace(texts=[aliases.written(text) if aliases else text for text in tree.table.texts])
    return replace(tree, aliases=aliases, table=table, ac_threshold=config.ac_threshold)


def lacks_words(phrases: Sequence[phrase_lists.Phrase], config: BoostingConfig, graph: WordGraph) -> bool:
    """Return whether the graph lacks a word of a phrase or, if the phrase has aliases, of the aliases."""
    spelled = phrase_lists.spelled_phrases(phrases, lambda phrase: _is_known(phrase, config, graph, None))
    return any(not _is_known(phrase, config, graph, None) for phrase in spelled)


def _is_known(phrase: phrase_lists.Phrase, config: BoostingConfig, graph: WordGraph, speller: Speller | None) -> bool:
    """Return whether the graph has all words of a phrase, or the speller can spell those that it lacks."""
    return any(not _fault(text, graph, speller) for text in _spellings(phrase.text, config, graph))


def _fault(text: str, graph: WordGraph, speller: Speller | None) -> str:
    """Return why the search cannot find a phrase, or "" if it can."""
    lacking = [word for word in text.split() if word not in graph.word_ids]
    if lacking and speller is None:
        return (
            f"the graph has not all words of {text!r}; wfst.added_words adds words to a graph that is built from "
            "wfst.arpa_lm_path; with wfst.open_vocabulary_decoding: true, the words of a request need not be in it"
        )
    if graph.pieces is not None and (unknown := graph.words[graph.unknown]) in text.split()[:-1]:
        return f"{text!r} goes on after {unknown}"
    try:
        for word in lacking:
            if speller is not None:
                speller.spelled(word, graph)
    except ValueError as error:
        return f"{text!r}: {error}"
    return ""


def _bonus(phrase: phrase_lists.Phrase, config: BoostingConfig, vocabulary: Vocabulary | None) -> float:
    """Return the bonus of the whole phrase, natural log."""
    weight = phrase_lists.weight_of(phrase)
    if config.score_per_phrase:
        return weight * config.score_per_phrase
    length = len(phrase.text.split())
    with suppress(ValueError):  # the graph may have letters that the vocabulary lacks
        length = len(vocabulary.segmentations(phrase.text, ignore_case=True)[0]) if vocabulary else length
    scores = token_scores(length, config.context_score, config.depth_scaling, config.uniform_weights)
    return weight * float(scores.sum())


def _spellings(text: str, config: BoostingConfig, graph: WordGraph) -> list[str]:
    """Return the phrase as written or, with `ignore_case`, in all letter cases that the graph has of its words."""
    forms = [_forms(word, config, graph) for word in text.split()]
    return [" ".join(words) for words in islice(product(*forms), _MOST_CASES)]


def _forms(word: str, config: BoostingConfig, graph: WordGraph) -> list[str]:
    """Return a word's forms in the graph: as written, else in other letter cases; without any, the word itself."""
    for ignore_case in (config.is_case_ignored, True):
        if forms := [form for form in spellings_of(word, ignore_case) if form in graph.word_ids]:
            if ignore_case and not config.is_case_ignored:
                warn_once(OTHER_CASE)
            return forms
    return [word]


def build_word_boosting(
    phrases: Mapping[str, float], graph: WordGraph, *, name: str = "phrases", speller: Speller | None = None
) -> BoostingTree:
    """Return the boosting automaton of words and phrases.

    Args:
        phrases: text -> bonus, natural log. Each occurrence of a phrase earns its bonus. Each word earns an equal
            share, which the search subtracts again if the phrase is not completed. A bonus < 0 is a penalty for the
            complete phrase only.
        graph: its words are the labels.
        speller: spells words that the graph lacks, in a graph `with_piece_labels` (`unknown_words.py`).

    Raises:
        ValueError: no phrase, an empty one, a bonus that is 0 or not finite, or a word that the graph does not have.
    """
    check_kind("graph", graph, WordGraph)
    check_kind("phrases", phrases, Mapping)
    if speller is not None and graph.pieces is None:
        raise FieldError("speller", speller, "None", f"for a graph ({graph.name}) that is not one with_piece_labels")
    sequences: list[ScoredSequence] = []
    texts: list[str] = []
    for phrase, bonus in phrases.items():
        check_kind("a phrase", phrase, str)
        words = phrase.split()
        if not words:
            raise ValueError("phrases has an empty phrase, expected at least one word")
        if not isinstance(bonus, Real) or bonus == 0 or not math.isfinite(bonus):
            raise FieldError(f"the bonus of {phrase!r}", bonus, "a finite number other than 0")
        if fault := _fault(phrase, graph, speller):
            raise ValueError(f"{name}: {fault}")
        sequences += _sequences(words, bonus, graph, speller)
        texts += [phrase] * (len(sequences) - len(texts))
    if not sequences:
        raise ValueError(f"{name} has no phrase, expected at least one")
    keys = [tuple(text.split()) for text in texts]
    build = partial(_build, vocab_size=len(graph.words), name=name)
    return BoostingTree.of(PhraseTable(sequences, keys, texts, build), 0.0)


def _build(sequences: Sequence[ScoredSequence], vocab_size: int, name: str) -> BackoffAutomaton:
    return _without_dead_ends(build_context_graph(sequences, vocab_size, name=name))


def _sequences(words: list[str], bonus: float, graph: WordGraph, speller: Speller | None) -> list[ScoredSequence]:
    """Return the label sequences of a phrase, and the label sequences of its words that the graph lacks.

    A separate sequence per missing word refunds the cost of <unk> wherever the word occurs. If several
    sequences begin at one label, only the best counts, so a phrase that begins with the word includes its
    refund. The refund of a later word is an advance until the word is complete, as outside of phrases.
    """
    labels: list[int] = []
    shares, promised, sequences = [], [], []
    total = 0.0
    for word in words:
        if word in graph.word_ids:
            labels.append(graph.word_ids[word])
            shares.append(bonus / len(words))
            total += max(0.0, shares[-1])
            promised.append(total)
            continue
        assert speller is not None
        spelled, refunds = speller.spelled(word, graph)
        sequences.append(ScoredSequence(spelled, refunds, float(refunds.sum())))
        share = np.zeros(len(spelled))
        share[1:-1] = bonus / len(words) / (len(spelled) - 2)
        if not labels and bonus > 0:
            share += refunds
            refunds = np.zeros(len(spelled))
        pending = np.cumsum(refunds)
        pending[-1] = 0.0  # the word is complete: its separate sequence has refunded it
        promised += (total + np.cumsum(np.maximum(share, 0.0)) + pending).tolist()
        total += float(np.maximum(share, 0.0).sum())
        labels += spelled
        shares += share.tolist()
    phrase = ScoredSequence(labels, np.array(shares), bonus, promised=np.array(promised))
    return [phrase, *sequences]


def _without_dead_ends(automaton: BackoffAutomaton) -> BackoffAutomaton:
    """Redirect arcs from states that only back off to their back-off states; the skipped states stay in the arrays."""
    states, arcs = (array.copy() for array in automaton.arrays)
    suffix = states["backoff_to"]
    same_end = states["final_weight"] == states["backoff_weight"] + states["final_weight"][suffix]
    dead_end = (states["arc_begin"] == states["arc_end"]) & same_end
    while (leads_there := dead_end[arcs["target"]]).any():
        targets = arcs["target"][leads_there]
        arcs["weight"][leads_there] += states["backoff_weight"][targets]
        arcs["target"][leads_there] = suffix[targets]
    return BackoffAutomaton.from_records(states, arcs, automaton.vocab_size, automaton.start_state, automaton.name)
