"""Packed LMs on disk: files of `container.py` with the words and the arrays of `packed.PackedArrays`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.container import Kind, decode_words, encode_words, map_container, write_arrays
from nemo_gpu_decoding.lm.packed import TABLES, PackedArrays, PackedLM
from nemo_gpu_decoding.lm.records import LM_STATE

DTYPES = {  # of the arrays, each [length]
    "words": np.dtype(np.uint8),
    "states": LM_STATE,
    "labels": np.dtype(np.uint64),
    "arcs": np.dtype(np.uint64),
    "codebook": np.dtype(np.float32),
}
PACKED_LM = Kind("packed LM", 2, DTYPES, "pack it anew", b"NGDNGRAM")
_BITS = ("label_bits", "target_bits", "cost_bits")
_FACTS = ("start_state", "sentence_end", "unknown", "counts", "max_error")


def save_packed_lm(lm: PackedLM, path: str | PathLike[str]) -> int:
    """Write an LM that is in memory; the size of the file in bytes."""
    tables = {name: getattr(lm.arrays, name) for name in TABLES}
    return write_arrays(path, PACKED_LM, facts_of(lm), {"words": encode_words(lm.words), **tables})


def is_packed_lm(path: str | PathLike[str]) -> bool:
    """Whether a file is a packed LM, by its first bytes.

    Raises:
        OSError: the file cannot be read.
    """
    return PACKED_LM.is_kind_of(path)


def load_packed_lm(path: str | PathLike[str], *, verify: bool = True) -> PackedLM:
    """The LM of a file, mapped into memory.

    Args:
        verify: compare the checksum of the arrays too, which reads the whole file, once per process
            (about a second per GB). Sizes and the header's checksum are always compared.

    Raises:
        ValueError: not a packed LM of this version, truncated, or damaged; names the file.
        OSError: the file cannot be read.
    """
    content = map_container(Path(path), PACKED_LM, verify)
    return assemble(content.arrays, content.facts, str(path))


def assemble(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> PackedLM:
    """An LM from its arrays and facts, see `facts_of`."""
    tables = [arrays[part] for part in TABLES]
    bits = [int(facts[part]) for part in _BITS]
    others = {part: facts[part] for part in _FACTS}
    return PackedLM(PackedArrays(*tables, *bits), decode_words(arrays["words"]), name=name, **others)  # type: ignore[arg-type]


def facts_of(lm: PackedLM) -> dict[str, Any]:
    """What a file says about an LM besides its arrays."""
    return {**{name: getattr(lm, name) for name in _FACTS}, **{name: getattr(lm.arrays, name) for name in _BITS}}
