"""Read NGPU-LM and boosting-tree files of NeMo (.nemo) without NeMo.

A .nemo file is a tar with `model_config.yaml` and `model_weights.ckpt`, a state dict. An
`NGramGPULanguageModel` with S states, A arcs and V labels holds

    arcs_weights, ilabels, to_states    [A + V]   the last V are padding
    start_end_arcs                      [S, 2]
    backoff_to_states, backoff_weights  [S]
    final_weights                       [S]       natural log, as all weights

State 0 is the root with one arc per label; utterances begin in state 1 (the context <s>) if the
configuration says `separate_bos_state`, else in state 0.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from os import PathLike
from typing import Any

import numpy as np
import torch
import yaml

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.ngram import resolve_final_weights

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
