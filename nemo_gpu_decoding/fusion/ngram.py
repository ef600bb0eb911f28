"""Load token-level n-gram LMs: NeMo's NGPU-LM files and ARPA files.

An LM becomes a back-off automaton over the labels 0 .. V-1 [NGPU-LM, section 2]. A state is a context: an n-gram below
the highest order. The arcs of a state are the n-grams that extend the context by one label. The back-off state is the
longest proper suffix of the context that is a state. Scores equal NeMo's (`NGramGPULanguageModel`) to the bit if NeMo
can read the file. This module also reads

- pruned files without some suffix n-grams: an absent context has back-off weight 0, so the longest
  suffix in the file gives the same scores;
- files without some prefix n-grams: the context gets a state, and the arc to it gets the weight of
  backing off;
- n-grams with <unk>, which represents every label that the LM does not list;
- files without <s> (an utterance begins in the root) or without </s> (the end has weight 0).

`lm/trie.py` builds the trie, states and arc targets, with labels >= V for special symbols. This module turns arcs with
</s> into final weights, and an arc with <unk> into one arc for each label that the LM does not list.
"""

import io
import logging
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, check_choice, check_int
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.lm.arpa import NGramBlock, read_arpa, without_repetitions
from nemo_gpu_decoding.lm.packed import NO_LABEL, ROOT
from nemo_gpu_decoding.lm.trie import BackoffArcs, NGramTrie
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.vocabulary import Vocabulary

logger = logging.getLogger("nemo_gpu_decoding")

# Labels of the special symbols; the trie stores -k as the label V + k - 1.
UNKNOWN, SENTENCE_START, SENTENCE_END = -1, -2, -3
_NUM_SPECIAL = 3
# NeMo's weight of a state that does not list </s>; its .nemo files may hold it (nemo NEG_INF)
NOT_FINAL = -10000.0


class _Arcs(NamedTuple):
    """The arcs of an automaton as columns [A], sorted by source state and label."""

    sources: np.ndarray
    labels: np.ndarray
    weights: np.ndarray  # float32, natural log
    targets: np.ndarray


def build_ngram_automaton(
    orders: Sequence[NGramBlock], vocab_size: int, *, normalize_unk: bool, name: str
) -> BackoffAutomaton:
    """Return the back-off automaton of an n-gram LM.

    Args:
        orders: the n-grams of order 1, 2, ...; their symbols are labels 0 .. vocab_size-1 or one of the
            special symbols above.
        normalize_unk: divide the probability of <unk> among the unlisted labels, as NeMo does.
    """
    unk, bos, eos = (vocab_size + k for k in range(_NUM_SPECIAL))
    orders = [_reachable(block, vocab_size) for block in orders]
    orders[0] = without_repetitions(orders[0], name)
    is_listed = np.zeros(vocab_size + _NUM_SPECIAL, bool)
    is_listed[orders[0].symbols[:, 0]] = True
    unlisted = np.flatnonzero(~is_listed[:vocab_size])
    if not is_listed[bos] and len(orders) > 1:
        logger.warning("%s has no <s>: utterances begin without context", name)
    trie = _trie_of(orders, len(is_listed), name)
    inner = trie.backoff_costs
    inner[trie.labels[: len(inner)] == eos] = 0
    if len(inner) and not any((block.symbols[:, :-1] == unk).any() for block in orders[1:]):
        inner[unk] = 0  # as in NeMo: unlisted labels lead to the root
    start = bos if is_listed[bos] else NO_LABEL
    linked = BackoffArcs(trie, start)
    states = linked.states[:-1]
    all_arcs = _Arcs(
        np.repeat(np.arange(len(states)), np.diff(linked.states["arc_begin"])),
        linked.labels.astype(np.int64), -linked.costs, linked.targets.astype(np.int64),
    )  # fmt: skip
    share = np.log(len(unlisted)) if normalize_unk and len(unlisted) > 1 else 0.0
    arcs = _without_special(all_arcs, vocab_size, unlisted, float(share))
    backoff_to, backoff_weights = states["backoff_to"].astype(np.int64), -states["backoff_cost"]
    final_weights = _final_weights(all_arcs, eos, backoff_to, backoff_weights, name)
    counts = np.bincount(arcs.sources, minlength=len(states))
    columns = Columns.grouped(
        counts, backoff_to, backoff_weights, final_weights, arcs.labels, arcs.weights, arcs.targets
    )
    return BackoffAutomaton.from_columns(columns, vocab_size, linked.start_state, name)


def resolve_final_weights(
    final_weights: np.ndarray, backoff_to: np.ndarray, backoff_weights: np.ndarray
) -> np.ndarray:
    """Give states without </s> (final weight <= NOT_FINAL) the final weight of their back-off state plus the back-off.

    float32 weights are added in NeMo's order. States of a back-off chain without </s> keep NOT_FINAL.
    """
    resolved = final_weights.astype(np.float32)
    states, paid = np.arange(len(resolved)), np.zeros(len(resolved), np.float32)
    pending = np.flatnonzero((resolved <= NOT_FINAL) & (backoff_to != states))
    while len(pending):
        paid[pending] += backoff_weights[states[pending]]
        states[pending] = backoff_to[states[pending]]
        listed = final_weights[states[pending]] > NOT_FINAL
        hit = pending[listed]
        resolved[hit] = paid[hit] + final_weights[states[hit]]
        at_root = backoff_to[states[pending]] == states[pending]
        pending = pending[~listed & ~at_root]
    return resolved


def _reachable(block: NGramBlock, vocab_size: int) -> NGramBlock:
    """Drop n-grams that no sentence contains: with <s> after another symbol, or </s> before another symbol."""
    labels = np.where(block.symbols < 0, vocab_size - 1 - block.symbols, block.symbols).astype(np.int32)
    bos, eos = vocab_size - 1 - SENTENCE_START, vocab_size - 1 - SENTENCE_END
    kept = (labels[:, 1:] != bos).all(1) & (labels[:, :-1] != eos).all(1)
    return NGramBlock(block.order, labels[kept], block.log10_probs[kept], block.log10_backoffs[kept])


def _trie_of(orders: Sequence[NGramBlock], num_labels: int, name: str) -> NGramTrie:
    """Return the trie of all n-grams and their contexts; contexts that the file does not list are added."""
    trie = NGramTrie([num_labels, *(len(block.symbols) for block in orders[1:])])
    for block in orders:
        if len(block.symbols) and trie.add(block) >= 0:
            return _trie_of(_with_contexts(orders), num_labels, name)
        if trie.close(block.order) >= 0:
            return _trie_of([without_repetitions(block, name) for block in orders], num_labels, name)
    return trie


def _with_contexts(orders: Sequence[NGramBlock]) -> list[NGramBlock]:
    """Return the n-grams of each order, with contexts that were missing; these have probability NaN."""
    completed = list(orders)
    for n in range(len(orders) - 1, 1, -1):
        block = completed[n - 1]
        ngrams, rows = np.unique(
            np.concatenate([block.symbols, completed[n].symbols[:, :-1]]), axis=0, return_index=True
        )
        missing = ngrams[rows >= len(block.symbols)]
        completed[n - 1] = NGramBlock(
            n,
            np.concatenate([block.symbols, missing]),
            np.append(block.log10_probs, np.full(len(missing), np.nan)),
            np.append(block.log10_backoffs, np.zeros(len(missing))),
        )
    return completed


def _without_special(arcs: _Arcs, vocab_size: int, unlisted: np.ndarray, unk_share: float) -> _Arcs:
    """Return the arcs with labels of the vocabulary only; an arc with <unk> becomes one arc per unlisted label.

    Args:
        unk_share: natural log of the number of labels that share the probability of <unk>.
    """
    shared = (arcs.weights.astype(np.float64) - unk_share).astype(np.float32)
    # arc i of the root has the label i: the root has arcs for unlisted labels already
    arcs.weights[unlisted], arcs.targets[unlisted] = shared[vocab_size], arcs.targets[vocab_size]
    unknown = np.flatnonzero((arcs.labels == vocab_size) & (arcs.sources != ROOT))
    known = _Arcs(*(column[arcs.labels < vocab_size] for column in arcs))
    if not len(unknown) or not len(unlisted):
        return known
    copies = len(unlisted)
    sources = np.append(known.sources, np.repeat(arcs.sources[unknown], copies))
    labels = np.append(known.labels, np.tile(unlisted, len(unknown)))
    order = np.argsort(sources * vocab_size + labels, kind="stable")
    return _Arcs(
        sources[order],
        labels[order],
        np.append(known.weights, np.repeat(shared[unknown], copies))[order],
        np.append(known.targets, np.repeat(arcs.targets[unknown], copies))[order],
    )


def _final_weights(
    arcs: _Arcs, eos: int, backoff_to: np.ndarray, backoff_weights: np.ndarray, name: str
) -> np.ndarray:
    """Return the final weight of each state, [S] natural log: the weight of </s>, back-offs included."""
    final = np.full(len(backoff_to), NOT_FINAL, np.float32)
    ends = arcs.labels == eos
    final[arcs.sources[ends]] = arcs.weights[ends]
    if (final <= NOT_FINAL).all():
        logger.warning("%s has no </s>: the end of an utterance is not scored", name)
        return np.zeros_like(final)
    return resolve_final_weights(final, backoff_to, backoff_weights)


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
    """Return the symbol that NeMo's LM scripts write for a token id: chr(id + 100)."""
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
    check_int("vocab_size", vocab_size, 1)
    check_choice("encoding", encoding, ENCODINGS)
    if encoding == "pieces" and vocabulary is None:
        raise FieldError("vocabulary", None, "the model's vocabulary", "with encoding='pieces'")
    if vocabulary is not None and len(vocabulary) != vocab_size:
        raise ValueError(f"vocabulary has {len(vocabulary)} pieces, expected vocab_size {vocab_size}")
    return load_lm_pool({"": path_of(path)}, vocab_size, vocabulary, encoding, normalize_unk)[""]


def load_lm_pool(
    paths: Mapping[str, Path],
    vocab_size: int,
    vocabulary: Vocabulary | None = None,
    encoding: str = "auto",
    normalize_unk: bool = True,
) -> dict[str, BackoffAutomaton]:
    """Load all LMs of a pool as `load_ngram_lm` does. A pool is one cache entry, as the cache has few entries."""
    pieces = vocabulary.pieces if vocabulary else None
    given = vocab_size, pieces, encoding, normalize_unk
    key = ("ngram", tuple(paths), *map(file_key, paths.values()), *given)
    return cached(key, lambda: {name: _load(path, *given) for name, path in paths.items()})


def _load(
    path: Path, vocab_size: int, pieces: tuple[str, ...] | None, encoding: str, normalize_unk: bool
) -> BackoffAutomaton:
    if path.suffix == ".nemo" or tarfile.is_tarfile(path):
        return load_nemo_automaton(path, vocab_size, with_final_weights=True)
    arpa = read_arpa(path)
    if pieces is not None and arpa.tokenizer not in ("", own := Vocabulary(pieces, "char").fingerprint):
        raise ValueError(
            f"{path} was made for the tokenizer {arpa.tokenizer}, expected {own}: build it for this model"
        )
    labels = _labels(path, arpa.symbols, vocab_size, pieces, encoding)
    orders = [replace(block, symbols=labels[block.symbols]) for block in arpa.orders]
    return build_ngram_automaton(orders, vocab_size, normalize_unk=normalize_unk, name=str(path))


def _labels(
    path: Path, symbols: Sequence[str], vocab_size: int, pieces: tuple[str, ...] | None, encoding: str
) -> np.ndarray:
    """Return the label of each symbol, [len(symbols)] int64: a token id or the label of a special symbol."""
    # of each encoding: maps a symbol to its token id or _NO_TOKEN
    readers: dict[str, Callable[[str], int]] = {"nemo": _read_nemo, "ids": _read_decimal}
    if pieces is not None:
        ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
        readers["pieces"] = lambda symbol: ids.get(symbol, _NO_TOKEN)
    if encoding != "auto":
        readers = {encoding: readers[encoding]}
    readings = {
        name: np.array([_SPECIAL[s] if s in _SPECIAL else read(s) for s in symbols]) for name, read in readers.items()
    }
    fitting = [name for name, ids in readings.items() if ((ids != _NO_TOKEN) & (ids < vocab_size)).all()]
    if len(fitting) > 1:
        raise ValueError(f"{path}: its tokens fit the encodings {' and '.join(fitting)}, expected one; set encoding")
    if not fitting:
        raise ValueError(_misfit(path, symbols, readings, vocab_size))
    return readings[fitting[0]]


def _read_nemo(symbol: str) -> int:
    return ord(symbol) - _NEMO_OFFSET if len(symbol) == 1 and ord(symbol) >= _NEMO_OFFSET else _NO_TOKEN


def _read_decimal(symbol: str) -> int:
    return int(symbol) if _NUMBER.fullmatch(symbol) else _NO_TOKEN


def _misfit(path: Path, symbols: Sequence[str], readings: dict[str, np.ndarray], vocab_size: int) -> str:
    """Return the reason why no encoding fits the symbols: the symbols are tokens of another model, or words."""
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
    "arcs_weights", "ilabels", "to_states", "start_end_arcs", "backoff_to_states", "backoff_weights", "final_weights",
)  # fmt: skip


def load_nemo_automaton(path: str | PathLike[str], vocab_size: int, *, with_final_weights: bool) -> BackoffAutomaton:
    """Return the automaton in a .nemo file: an NGPU-LM (with final weights) or a boosting tree (without).

    NeMo's searches ignore the final weights of boosting trees, which are bonuses for the end-of-sentence
    token of attention decoders.

    Raises:
        ValueError: the file is no .nemo archive, or has another kind of model or vocabulary size.
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
    """Verify the checksums in the ZIP file of a PyTorch state dict, which `torch.load` does not verify."""
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
