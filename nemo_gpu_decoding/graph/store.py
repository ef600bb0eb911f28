"""Store word graphs on disk in files of `container.py`, with the words, the graph and its lexicon."""

import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.container import Kind, decode_words, encode_words, map_container, naming_damage, write_arrays
from nemo_gpu_decoding.graph.csr import EPSILON, GRAPH_ARC, GRAPH_STATE, GraphArrays, Spellings, WordGraph
from nemo_gpu_decoding.graph.openfst import FILE_MARK
from nemo_gpu_decoding.plain_text import path_of

logger = logging.getLogger("nemo_gpu_decoding")

_INT32 = np.dtype(np.int32)
_DTYPES = {
    "words": np.dtype(np.uint8),
    "states": GRAPH_STATE,
    "arcs": GRAPH_ARC,
    "epsilons": EPSILON,
    "word_sequences": _INT32,
    **{f"spelling_{name}": _INT32 for name in Spellings._fields},
}
WORD_GRAPH = Kind("word graph", 2, _DTYPES, "build it anew")
_FACTS = ("start", "unknown", "report", "name")


def save_graph(graph: WordGraph, path: str | PathLike[str]) -> None:
    """Write a graph; the file is created only if writing succeeds.

    Raises:
        ValueError: the graph has labels of pieces; save the original and use `with_piece_labels` after loading.
    """
    if graph.pieces is not None:
        raise ValueError(f"graph ({graph.name}) has labels of pieces, expected the graph that it was made of")
    arrays = {"words": encode_words(graph.words), **graph.arrays._asdict()}
    if graph.spellings is not None:
        arrays |= {f"spelling_{name}": array for name, array in graph.spellings._asdict().items()}
    facts = {"report": dict(graph.report), "start": graph.start, "unknown": graph.unknown}
    write_arrays(path, WORD_GRAPH, {**facts, "name": graph.name}, arrays)


def load_graph(path: str | PathLike[str], *, verify: bool = True) -> WordGraph:
    """Return the word graph in a file, mapped into memory.

    Args:
        verify: compare the checksum of the arrays, which reads the whole file once per process.

    Raises:
        ValueError: the file is damaged, truncated, or no graph of this version; the message names it.
        OSError: the file cannot be read.
    """
    path = path_of(path)
    content = map_container(path, WORD_GRAPH, verify)
    arrays, spellings = content.arrays, None
    with naming_damage(path, WORD_GRAPH.remedy):
        if "spelling_words" in arrays:
            spellings = Spellings(*(arrays[f"spelling_{name}"] for name in Spellings._fields))
        tables = GraphArrays(*(arrays[name] for name in GraphArrays._fields))
        facts = {name: content.facts[name] for name in _FACTS}
        return WordGraph(tables, words=decode_words(arrays["words"]), spellings=spellings, **facts)


def load_or_build(path: Path, build: Callable[[], WordGraph]) -> WordGraph:
    """Load a graph from a cache file; if that fails, build the graph and save it there."""
    try:
        if path.exists():
            return load_graph(path)
    except (OSError, ValueError) as error:
        logger.warning("the graph that was kept cannot be used, building it anew: %s", error)
    graph = build()
    try:
        save_graph(graph, path)
    except OSError as error:
        logger.warning("can't keep the graph in %s, it serves this process: %s", path.parent, error)
        return graph
    logger.info("the graph is kept in %s", path)
    return load_graph(path, verify=False)


def is_word_graph(path: str | PathLike[str]) -> bool:
    """Return whether a file is a graph of this package or of OpenFst, by its first bytes."""
    with open(path, "rb") as file:
        is_fst = file.read(len(FILE_MARK)) == FILE_MARK
    return is_fst or WORD_GRAPH.is_kind_of(path)
