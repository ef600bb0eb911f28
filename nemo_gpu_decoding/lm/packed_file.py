"""Packed LMs on disk: files of `container.py` with the words and the arrays of `packed.PackedArrays`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding import container
from nemo_gpu_decoding.checks import check_int
from nemo_gpu_decoding.lm import packed
from nemo_gpu_decoding.lm.records import LM_STATE

DTYPES = {  # of the arrays, each [length]
    "words": np.dtype(np.uint8),
    "states": LM_STATE,
    "labels": np.dtype(np.uint64),
    "arcs": np.dtype(np.uint64),
}
PACKED_LM = container.Kind("packed LM", 2, DTYPES, "pack it anew")
_BITS = ("label_bits", "target_bits")
_FACTS = ("start_state", "sentence_end", "unknown", "counts")


def save_packed_lm(lm: packed.PackedLM, path: str | PathLike[str]) -> int:
    """Write an LM to a file; returns the size of the file in bytes."""
    tables = {name: getattr(lm.arrays, name) for name in packed.TABLES}
    return container.write_arrays(path, PACKED_LM, facts_of(lm), {"words": container.encode_words(lm.words), **tables})


def is_packed_lm(path: str | PathLike[str]) -> bool:
    """Whether a file is a packed LM, by its first bytes."""
    return PACKED_LM.is_kind_of(path)


def load_packed_lm(path: str | PathLike[str], *, verify: bool = True) -> packed.PackedLM:
    """The LM of a file, mapped into memory.

    Args:
        verify: compare the checksum of the arrays, and check targets and back-offs. This reads the whole
            file once per process (about a second per GB). With False, only sizes and the header's checksum
            are compared, and look-ups in a damaged file may crash the process.

    Raises:
        ValueError: not a packed LM of this version, truncated, or damaged; names the file.
        OSError: the file cannot be read.
    """

    def check(content: container.Content) -> None:
        _check_arcs(assemble(content.arrays, content.facts, str(path)))

    content = container.map_container(Path(path), PACKED_LM, verify, check)
    with container.naming_damage(Path(path), PACKED_LM.remedy):
        lm = assemble(content.arrays, content.facts, str(path))
        _check_facts(lm)
    return lm


def _check_facts(lm: packed.PackedLM) -> None:
    """Raise a FieldError unless the header and the sizes of arrays agree; reads no array."""
    arrays, words, states = lm.arrays, lm.vocab_size, lm.num_states
    check_int("the number of words", words, 1, 1 << 32)
    check_int("the number of states", states, 1, 1 << 32)
    check_int("label_bits", arrays.label_bits, packed.bits_for(words - 1), 32)
    check_int("target_bits", arrays.target_bits, packed.bits_for(states - 1), 32)
    check_int("start_state", lm.start_state, 0, states - 1)
    for name in ("sentence_end", "unknown"):
        check_int(name, getattr(lm, name), packed.NO_LABEL, words - 1)
    for name, bits in (("labels", arrays.label_bits), ("arcs", arrays.target_bits + packed.COST_BITS)):
        check_int(f"the size of {name}", len(getattr(arrays, name)), packed.num_words(lm.num_arcs, bits), 1 << 62)


def _check_arcs(lm: packed.PackedLM) -> None:
    """Raise a ValueError if a target or back-off is out of range; look-ups do not check indices.

    Reads all arrays except the costs: about 2 s for 10^9 arcs, plus the time of the disk.
    """
    _check_facts(lm)
    arrays, states, count = lm.arrays, lm.arrays.states, lm.num_arcs
    if (bad := packed.first_bad_state(states, lm.vocab_size)) >= 0:
        raise ValueError(
            f"state {bad} is {states[bad]}, expected an arc_begin that ascends from 0 and {lm.vocab_size}, "
            "and a backoff_to before the state"
        )
    for name, words, bits, value_bits, size in (
        ("the label", arrays.labels, arrays.label_bits, arrays.label_bits, lm.vocab_size),
        ("the target", arrays.arcs, arrays.target_bits + packed.COST_BITS, arrays.target_bits, lm.num_states),
    ):
        largest = packed.largest_of(words, bits, np.uint64((1 << value_bits) - 1), count)
        if largest >= size:
            raise ValueError(f"{name} of an arc is {largest}, expected 0 .. {size - 1}")


def assemble(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> packed.PackedLM:
    """An LM from its arrays and facts, see `facts_of`.

    Raises:
        ValueError: the file is of an earlier release and has rounded costs; names the file.
    """
    if (cost_bits := facts.get("cost_bits", packed.COST_BITS)) != packed.COST_BITS:
        raise ValueError(f"{name} has costs of {cost_bits} bits, expected {packed.COST_BITS}: {PACKED_LM.remedy}")
    tables = [arrays[part] for part in packed.TABLES]
    bits = [int(facts[part]) for part in _BITS]
    others = {part: facts[part] for part in _FACTS}
    words = container.decode_words(arrays["words"])
    return packed.PackedLM(packed.PackedArrays(*tables, *bits), words, name=name, **others)  # type: ignore[arg-type]


def facts_of(lm: packed.PackedLM) -> dict[str, Any]:
    """The header of a file: all fields of an LM except its arrays."""
    return {**{name: getattr(lm, name) for name in _FACTS}, **{name: getattr(lm.arrays, name) for name in _BITS}}
