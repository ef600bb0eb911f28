"""The two LMs of a decoding config with paged_biglm."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.lm.packed_file import is_packed_lm, load_packed_lm

logger = logging.getLogger("nemo_gpu_decoding")

_WORTH_PACKING = 1 << 28  # bytes of an ARPA file that takes many seconds to read


def load_large_lm(path: Path) -> PackedLM:
    """The large LM: mapped if it is packed, else packed in memory.

    Raises:
        ValueError: the file is damaged, or no LM.
    """
    return cached(("large LM", file_key(path)), partial(_load_large, path))


def load_small_lm(path: Path, graph: WordGraph) -> PackedLM:
    """The LM that a graph was made of, with the words that were added to it for the graph.

    Raises:
        ValueError: the file is damaged, no LM, or packed without words that the graph has.
    """
    return cached(("small LM", file_key(path), graph.fingerprint), partial(_load_small, path, graph))


def _load_large(path: Path) -> PackedLM:
    if is_packed_lm(path):
        return load_packed_lm(path)
    if path.stat().st_size > _WORTH_PACKING:
        logger.warning(
            "`wfst.large_lm_path` is the ARPA file %s, which is read as a whole and kept in memory; "
            "what `nemo-gpu-decoding pack-lm` makes of it loads at once.",
            path,
        )
    return pack_arpa_in_memory(path)


def _load_small(path: Path, graph: WordGraph) -> PackedLM:
    words = _words_of(graph)
    if not is_packed_lm(path):
        # the graph's words that the file lacks were added by the same rule when the graph was built
        return pack_arpa_in_memory(path, added_words=words)
    lm = load_packed_lm(path)
    lacking = [word for word in words if word not in lm.word_ids]
    if lacking:
        raise ValueError(
            f"wfst.small_lm_path is {path}, which has not all words of the graph, such as "
            f"{', '.join(map(repr, lacking[:3]))}, expected the LM that the graph was made of; words "
            "that were added to the graph need the ARPA file"
        )
    return lm


def _words_of(graph: WordGraph) -> list[str]:
    """The words that the graph tells; what stands in <...> is no word."""
    words = [graph.words[label] for label in graph.output_words.tolist()]
    return [word for word in words if not (word.startswith("<") and word.endswith(">"))]
