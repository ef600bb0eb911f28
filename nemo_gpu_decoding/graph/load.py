"""Get the word graph of a decoding config: build it from an LM with the model's tokenizer, or read a graph file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, leave_out
from nemo_gpu_decoding.graph.build import build_graph, listed_words, load_fst_graph, with_warning
from nemo_gpu_decoding.graph.csr import DEFAULT_TOPOLOGY, GRAPH, TOPOLOGIES, WordGraph
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.openfst import read_input_symbols
from nemo_gpu_decoding.graph.store import WORD_GRAPH, load_graph, save_graph
from nemo_gpu_decoding.plain_text import read_lines
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import Vocabulary, letter_cases, spellings_of

_BLANKS = ("<blk>", "<blank>")  # as NeMo and k2 name it
_TOKENWORD = "#1"  # begins and ends a spelled word in graphs of NeMo's `mkgraph_ctc_ov`
_LOOKED_AT = 2000  # number of a graph's spellings to compare with the model's vocabulary


@checked_options
@dataclass(frozen=True)
class GraphOptions:
    """The source of a graph and the options that are known before the graph is loaded."""

    ready_made: Path | None = option(nemo=None)  # a graph file of this package, a folder with one, or an OpenFst file
    arpa: Path | None = option(nemo=None)  # the LM to build a graph from, if there is no ready-made one
    keep_at: Path | None = option(None, nemo=None)  # file to save a built graph to
    topology: str | None = None  # compact, normal or minimal; None: compact, or the one inside a ready-made graph
    words: Path | None = option(None, nemo="words_path")  # words.txt of an OpenFst file
    open_vocabulary: OpenVocabulary | None = option(None, nemo=None)
    segmentations: int = option(1, low=1)  # spellings of each word
    added_words: Path | tuple[str, ...] | None = None  # words that the LM lacks, or a text file of words or phrases
    source_lang: str | None = None  # for aggregate tokenizers: the language of the LM


LoadedGraph = tuple[WordGraph, str]  # a graph, and the topology for the search


def load_word_graph(
    options: GraphOptions, vocabulary: Vocabulary, blank_id: int, boosted: Sequence[str] = (), any_case: bool = False
) -> LoadedGraph:
    """Load or build the graph of a config, with a cache.

    Args:
        vocabulary: the model's tokens.
        blank_id: the blank's column in the model's log-probs.
        boosted: words of phrases, which are added to the LM if it lacks them; no effect on a ready-made graph.
        any_case: accept words of the LM in another letter case.

    Raises:
        ValueError: a file is damaged, the graph was made for another model, or it contradicts the config.
        ImportError: building graphs needs kaldifst.
    """
    if options.ready_made is not None:
        path = _graph_file(options.ready_made)
        key: Any = "ready-made graph", file_key(path), options, vocabulary, blank_id
        return cached(key, partial(_load, path, options, vocabulary, blank_id))
    assert options.arpa is not None
    words = tuple(_words_of(options.added_words or ())), tuple(boosted), any_case
    key = "built graph", file_key(options.arpa), options, vocabulary, words
    return cached(key, partial(_build, options, vocabulary, *words))


def _build(
    options: GraphOptions, vocabulary: Vocabulary, added: Sequence[str], boosted: Sequence[str], ignore_case: bool
) -> LoadedGraph:
    assert options.arpa is not None
    vocabulary = in_language(vocabulary, options.source_lang)
    words = list(added)
    if boosted:
        listed = set(listed_words(options.arpa))
        lacking = [word for word in boosted if listed.isdisjoint(spellings_of(word, ignore_case))]
        words += [_to_add(word, vocabulary, ignore_case) for word in lacking]
    faults = {}
    for word in words:
        try:
            vocabulary.tokenize(word)
        except ValueError as error:
            faults[word] = str(error)
    words = [word for word in words if word not in faults]
    leave_out("wfst.added_words", [faults[word] for word in added if word in faults], len(words), "words")
    graph = build_graph(
        options.arpa,
        vocabulary,
        segmentations=options.segmentations,
        open_vocabulary=options.open_vocabulary,
        added_words=words,
    )
    graph = replace(graph, name=str(options.arpa))  # a cached graph has the file name of its first build
    if options.keep_at is not None:
        save_graph(graph, options.keep_at)
    return graph, options.topology or DEFAULT_TOPOLOGY


def _to_add(word: str, vocabulary: Vocabulary, ignore_case: bool) -> str:
    """Return the word as written or, with `ignore_case`, in the first letter case that the model can spell."""
    for case in letter_cases(word) if ignore_case else []:
        with suppress(ValueError):
            vocabulary.tokenize(case)
            return case
    return word


def _load(path: Path, options: GraphOptions, vocabulary: Vocabulary, blank_id: int) -> LoadedGraph:
    is_ours = WORD_GRAPH.is_kind_of(path)
    if is_ours and options.words is not None:
        raise ValueError(f"wfst.words_path is set, but {path} holds its words itself")
    if is_ours:
        graph = with_warning(load_graph(path), str(path))
    else:
        _check_input_symbols(path, vocabulary, blank_id)
        graph = _load_fst(path, options.words)
    if options.open_vocabulary and not graph.unknown:
        raise ValueError(
            f"wfst.open_vocabulary_decoding is true, but {path} was built without an open vocabulary; "
            "build it anew from wfst.arpa_lm_path"
        )
    _check_vocabulary(graph, path, vocabulary, blank_id)
    return graph, _topology(graph, path, options.topology, blank_id)


def _load_fst(path: Path, words: Path | None) -> WordGraph:
    try:
        graph = load_fst_graph(path, words)
    except FieldError as error:
        raise ValueError(f"wfst.words_path is not set, expected {error.expected}") from None
    output_labels = (graph.arrays.arcs["olabel"], graph.arrays.epsilons["olabel"])
    if any((labels == graph.word_ids.get(_TOKENWORD, -1)).any() for labels in output_labels):
        raise ValueError(
            f"{path} spells unknown words between marks {_TOKENWORD!r} as NeMo's open vocabulary does, "
            "expected a graph of words: build one from wfst.arpa_lm_path, with "
            "wfst.open_vocabulary_decoding"
        )
    return graph


def _graph_file(path: Path) -> Path:
    """Return the path of the graph: the path itself or, for a folder, the graph file in it."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.graph"))
    if len(files) != 1:
        raise ValueError(f"wfst.wfst_lm_path is the folder {path} with {len(files)} files *.graph, expected one")
    return files[0]


def _topology(graph: WordGraph, path: Path, wanted: str | None, blank_id: int) -> str:
    """Return the topology for a file: "graph" for T o L o G, whose arcs read blanks; another value for L o G."""
    reads_blanks = bool((graph.arrays.arcs["ilabel"] == blank_id).any())
    topology = wanted or (TOPOLOGIES[GRAPH] if reads_blanks else DEFAULT_TOPOLOGY)
    if (topology == TOPOLOGIES[GRAPH]) != reads_blanks:
        kind = "reads" if reads_blanks else "never reads"
        raise ValueError(
            f"wfst.topology is {topology!r}, but {path} {kind} the blank (column {blank_id}): expected "
            f"{'graph' if reads_blanks else 'compact, normal or minimal'}"
        )
    return topology


def _check_vocabulary(graph: WordGraph, path: Path, vocabulary: Vocabulary, blank_id: int) -> None:
    """Raise if the graph was built with another tokenizer, which would give wrong results without an error."""
    if graph.largest_label > blank_id:
        raise ValueError(
            f"{path} reads column {graph.largest_label}, expected 0 .. {blank_id}: it was made for another model"
        )
    spellings = graph.spellings
    if spellings is None:
        return
    read, alike, example = min(len(spellings.words), _LOOKED_AT), 0, ""
    for n in range(read):
        tokens = spellings.tokens[spellings.begin[n] : spellings.begin[n + 1]].tolist()
        word = graph.words[spellings.words[n]]
        spelled = vocabulary.text(tokens).strip()
        alike += spelled.casefold() == word.casefold()
        example = example or (f"{word!r} is spelled {spelled!r}" if spelled != word else "")
    if 2 * alike < read:  # lexicons may spell some words differently: "AT&T" as "a t and t"
        raise ValueError(
            f"{path} was made with another tokenizer than the model's: {example}; build it anew from wfst.arpa_lm_path"
        )


def _check_input_symbols(path: Path, vocabulary: Vocabulary, blank_id: int) -> None:
    """Compare the input symbols of a file with the vocabulary; label n is column n - 1."""
    symbols = read_input_symbols(path)
    if not symbols:
        return
    named = [symbols.get(column + 1, "nothing") for column in range(len(vocabulary))]
    differing = [c for c, piece in enumerate(vocabulary.pieces) if named[c] != piece]
    if 2 * len(differing) > len(vocabulary):  # some tokens may have other names, such as <unk>
        first = differing[0]
        raise ValueError(
            f"{path} was made with another tokenizer than the model's: column {first} is "
            f"{named[first]!r} there and {vocabulary.pieces[first]!r} in the model"
        )
    blank = next((label - 1 for label, text in symbols.items() if text in _BLANKS), blank_id)
    if blank != blank_id:
        raise ValueError(f"{path} has its blank in column {blank}, expected {blank_id}: it was made for another model")


def in_language(vocabulary: Vocabulary, language: str | None) -> Vocabulary:
    """Return the vocabulary with the tokenizer for the language of the LM."""
    tokenizers = vocabulary.encode_by_language
    if not tokenizers:
        if language is not None:
            raise ValueError(f"wfst.source_lang is {language!r}, which is for models with one tokenizer per language")
        return vocabulary
    if language is None or language not in tokenizers:
        expected = f"the language of the LM, one of {', '.join(sorted(tokenizers))}"
        raise FieldError("wfst.source_lang", language, expected)
    return replace(vocabulary, encode=tokenizers[language], encode_by_language=None)


def _words_of(added: tuple[str, ...] | Path) -> list[str]:
    """Return the words of a list or of a text file; text after a tab is the weight of a phrase."""
    if not isinstance(added, Path):
        return [word for entry in added for word in entry.split()]
    return [word for line in read_lines(added) for word in line.partition("\t")[0].split()]
