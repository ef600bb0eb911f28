"""Load token-level n-gram LMs: NeMo's NGPU-LM files and ARPA files."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, check_choice
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.ngram_automaton import (
    SENTENCE_END,
    SENTENCE_START,
    UNKNOWN,
    build_ngram_automaton,
    resolve_final_weights,
)
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.vocabulary import Vocabulary

# How the symbols of an ARPA file name tokens:
#   nemo    chr(id + 100), what NeMo's LM scripts write
#   ids     decimal token ids
#   pieces  the pieces themselves; needs the vocabulary
ENCODINGS = ("auto", "nemo", "ids", "pieces")
_NEMO_OFFSET = 100
_SPECIAL = {"<unk>": UNKNOWN, "<UNK>": UNKNOWN, "<s>": SENTENCE_START, "</s>": SENTENCE_END}
_NUMBER = re.compile("[0-9]{1,9}")
_NO_TOKEN = -100
_SHOWN = 5  # unknown symbols listed in messages


def nemo_symbol(token: int) -> str:
    """How NeMo's LM scripts write a token."""
    return chr(token + _NEMO_OFFSET)


def load_ngram_lm(
    path: str | PathLike[str],
    vocab_size: int,
    *,
    vocabulary: Vocabulary | None = None,
    encoding: str = "auto",
    normalize_unk: bool = True,
) -> BackoffAutomaton:
    """Load an n-gram LM over the tokens of a model; scores are equal to NeMo's to the bit.

    Results are cached by the file's path, size and modification time.

    Args:
        path: NGPU-LM file (.nemo) or token-level ARPA file, plain or gzipped.
        vocab_size: V, the number of tokens without the blank.
        vocabulary: the model's tokens, needed for ARPA files that spell tokens as pieces.
        encoding: how an ARPA file names tokens, one of `ENCODINGS`; "auto" detects it.
        normalize_unk: divide the probability of <unk> among the tokens that an ARPA file does not list
            (False: each of them gets all of it, as in KenLM).

    Raises:
        ValueError: the file is damaged, of another kind (word-level ARPA, KenLM binary) or made for
            another vocabulary; the encoding is unknown or ambiguous.
    """
    if vocab_size < 1:
        raise FieldError("vocab_size", vocab_size, "at least 1")
    check_choice("encoding", encoding, ENCODINGS)
    if encoding == "pieces" and vocabulary is None:
        raise FieldError("vocabulary", None, "the model's vocabulary", "with encoding='pieces'")
    if vocabulary is not None and len(vocabulary) != vocab_size:
        raise ValueError(f"vocabulary has {len(vocabulary)} pieces, expected vocab_size {vocab_size}")
    pieces = vocabulary.pieces if vocabulary else None
    key = ("ngram", file_key(path), vocab_size, pieces, encoding, normalize_unk)
    return cached(key, partial(_load, Path(path), vocab_size, pieces, encoding, normalize_unk))


def load_lm_pool(
    paths: Mapping[str, Path], vocab_size: int, *, vocabulary: Vocabulary | None = None, encoding: str = "auto"
) -> dict[str, BackoffAutomaton]:
    """Load named LMs as `load_ngram_lm` does. They are one entry of the cache, which may have fewer places."""
    pieces = vocabulary.pieces if vocabulary else None
    key = ("lm pool", tuple(paths), *map(file_key, paths.values()), vocab_size, pieces, encoding)

    def load() -> dict[str, BackoffAutomaton]:
        return {name: _load(path, vocab_size, pieces, encoding, True) for name, path in paths.items()}

    return cached(key, load)


def _load(
    path: Path, vocab_size: int, pieces: tuple[str, ...] | None, encoding: str, normalize_unk: bool
) -> BackoffAutomaton:
    if path.suffix == ".nemo" or tarfile.is_tarfile(path):
        return load_nemo_automaton(path, vocab_size, with_final_weights=True)
    arpa = read_arpa(path)
    labels = _labels(path, arpa.symbols, vocab_size, pieces, encoding)
    orders = [replace(block, symbols=labels[block.symbols]) for block in arpa.orders]
    return build_ngram_automaton(orders, vocab_size, normalize_unk=normalize_unk, name=str(path))


def _labels(
    path: Path, symbols: Sequence[str], vocab_size: int, pieces: tuple[str, ...] | None, encoding: str
) -> np.ndarray:
    """The label of each symbol: a token id or one of the special symbols. [len(symbols)] int64"""
    readers = _symbol_readers(pieces)
    if encoding != "auto":
        readers = {encoding: readers[encoding]}
    readings = {
        name: np.array([_SPECIAL[s] if s in _SPECIAL else read(s) for s in symbols]) for name, read in readers.items()
    }
    fitting = [name for name, ids in readings.items() if _fits(ids, vocab_size)]
    if len(fitting) > 1:
        raise ValueError(f"{path}: its tokens fit the encodings {' and '.join(fitting)}, expected one; set encoding")
    if not fitting:
        raise ValueError(_misfit(path, symbols, readings, vocab_size))
    return readings[fitting[0]]


def _symbol_readers(pieces: tuple[str, ...] | None) -> dict[str, Callable[[str], int]]:
    """Per encoding, a function from a symbol to its token id or _NO_TOKEN."""
    readers: dict[str, Callable[[str], int]] = {"nemo": _read_nemo, "ids": _read_decimal}
    if pieces is not None:
        ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
        readers["pieces"] = lambda symbol: ids.get(symbol, _NO_TOKEN)
    return readers


def _read_nemo(symbol: str) -> int:
    return ord(symbol) - _NEMO_OFFSET if len(symbol) == 1 and ord(symbol) >= _NEMO_OFFSET else _NO_TOKEN


def _read_decimal(symbol: str) -> int:
    return int(symbol) if _NUMBER.fullmatch(symbol) else _NO_TOKEN


def _fits(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(((ids != _NO_TOKEN) & (ids < vocab_size)).all())


def _misfit(path: Path, symbols: Sequence[str], readings: dict[str, np.ndarray], vocab_size: int) -> str:
    """Why no encoding fits: tokens of another model, or words."""
    for name, ids in readings.items():
        if name != "pieces" and (ids != _NO_TOKEN).all():
            return (
                f"{path} has token ids up to {ids.max()} (as {name}), expected 0 .. {vocab_size - 1}: "
                "it belongs to another tokenizer"
            )
    unknown = {name: np.flatnonzero(ids == _NO_TOKEN) for name, ids in readings.items()}
    closest = min(unknown, key=lambda name: len(unknown[name]))
    examples = ", ".join([repr(symbols[i]) for i in unknown[closest][:_SHOWN]])
    if len(unknown[closest]) > _SHOWN:
        examples += ", ..."
    return (
        f"{path}: {len(unknown[closest])} of {len(symbols)} symbols are no tokens of the model "
        f"({examples}; tried as {', '.join(unknown)}). "
        "If this is a word-level LM, decode with strategy cuda_wfst; flexctc_beam, alsd_pp and aes_pp "
        "need an LM over the model's tokens"
    )


_TENSORS = (
    "arcs_weights",
    "ilabels",
    "to_states",
    "start_end_arcs",
    "backoff_to_states",
    "backoff_weights",
    "final_weights",
)


def load_nemo_automaton(path: str | PathLike[str], vocab_size: int, *, with_final_weights: bool) -> BackoffAutomaton:
    """The automaton of an NGPU-LM (with final weights) or of a boosting tree (without).

    NeMo's searches do not add the final weights of boosting trees: they are bonuses for the
    end-of-sentence token of attention decoders.

    Raises:
        ValueError: no .nemo archive, another kind of model, or another vocabulary size.
    """
    config, tensors = _read_archive(path)
    if config["vocab_size"] != vocab_size:
        raise ValueError(
            f"{path} was made for vocab_size {config['vocab_size']}, expected {vocab_size}: "
            "it belongs to another tokenizer"
        )
    num_arcs, num_states = config["num_arcs"], len(tensors["backoff_to_states"])
    automaton = BackoffAutomaton.from_columns(
        Columns(
            arc_begin=tensors["start_end_arcs"][:, 0],
            arc_end=tensors["start_end_arcs"][:, 1],
            backoff_to=tensors["backoff_to_states"],
            backoff_weights=tensors["backoff_weights"],
            final_weights=tensors["final_weights"] if with_final_weights else np.zeros(num_states, np.float32),
            arc_labels=tensors["ilabels"][:num_arcs],
            arc_weights=tensors["arcs_weights"][:num_arcs],
            arc_targets=tensors["to_states"][:num_arcs],
        ),
        vocab_size=vocab_size,
        start_state=1 if config.get("separate_bos_state", True) else 0,
        name=str(path),
    )
    if with_final_weights:
        states = automaton.arrays.states
        states["final_weight"] = resolve_final_weights(
            tensors["final_weights"], states["backoff_to"], states["backoff_weight"]
        )
    return automaton


def _read_archive(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with tarfile.open(path, "r:*") as archive:
            members = {member.name.rsplit("/", 1)[-1]: member for member in archive if member.isfile()}
            config = yaml.safe_load(_content(archive, members, "model_config.yaml"))
            weights = _content(archive, members, "model_weights.ckpt")
        _compare_checksums(weights)
        state = torch.load(io.BytesIO(weights), map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises many types of errors for damaged files
        raise ValueError(f"{path} is not a readable .nemo archive: {error}") from error
    if not isinstance(config, dict) or not isinstance(state, dict):
        raise ValueError(f"{path} is not a readable .nemo archive: its configuration or weights are not a mapping")
    missing = [name for name in _TENSORS if name not in state]
    if missing:
        raise ValueError(
            f"{path} holds a {config.get('target', 'model')!r} without {missing[0]}, "
            "expected an n-gram LM or a boosting tree"
        )
    for name in ("vocab_size", "num_arcs"):
        if not isinstance(config.get(name), int):
            raise ValueError(f"{path} is damaged: {name} is {config.get(name)!r}, expected an integer")
    return config, {name: state[name].numpy() for name in _TENSORS}


def _compare_checksums(weights: bytes) -> None:
    """Check the checksums in the ZIP file of a state dict, which `torch.load` ignores."""
    if not zipfile.is_zipfile(io.BytesIO(weights)):  # torch's old format, without checksums
        return
    with zipfile.ZipFile(io.BytesIO(weights)) as archive:
        has_checksums = any(member.CRC for member in archive.infolist())  # not with set_crc32_options(False)
        if has_checksums and (damaged := archive.testzip()):
            raise ValueError(f"{damaged} in model_weights.ckpt does not match its checksum")


def _content(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], name: str) -> bytes:
    if name not in members:
        raise KeyError(f"it has no {name}")
    file = archive.extractfile(members[name])
    assert file is not None  # only files are in `members`
    return file.read()
