"""Where a task comes from: files that the user names, or the synthetic one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.bench.cache import plain_file
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.synthetic import synthetic_task
from nemo_gpu_decoding.bench.task import Task, spelled_by
from nemo_gpu_decoding.vocabulary import Vocabulary

ARRAYS = ("log_probs", "lengths", "tokens", "texts", "frame_seconds")


def make_task(options: BenchOptions) -> Task:
    """The task that the options ask for: from files if `data` is given, else synthetic."""
    task = read_task(options) if options.data else synthetic_task(options)
    return task.first(options.utterances)


def read_task(options: BenchOptions) -> Task:
    """The task of the files that the options name.

    Raises:
        ValueError: files lack something or do not fit each other.
    """
    assert options.data is not None
    with np.load(options.data) as file:
        missing = ", ".join(sorted(set(ARRAYS) - set(file)))
        if missing:
            raise ValueError(f"data is {options.data!r}, which lacks the arrays {missing}")
        arrays = {name: file[name] for name in file}
    vocab_size = arrays["log_probs"].shape[-1] - 1
    if options.tokenizer is None:
        raise ValueError("tokenizer is None, expected the model that spells the tokens of data=")
    vocabulary = _read_vocabulary(options.tokenizer)
    if len(vocabulary) != vocab_size:
        raise ValueError(f"tokenizer has {len(vocabulary)} pieces, expected {vocab_size} as in data=")
    lexicon = _read_lexicon(options.lexicon, vocabulary.pieces) if options.lexicon else {}
    if lexicon:
        vocabulary = replace(vocabulary, encode=spelled_by(lexicon))
    return Task(
        name=Path(options.data).stem,
        log_probs=torch.from_numpy(arrays["log_probs"].astype(np.float32)),
        lengths=torch.from_numpy(arrays["lengths"].astype(np.int64)),
        frame_seconds=float(arrays["frame_seconds"]),
        texts=[str(text) for text in arrays["texts"]],
        tokens=[row[row >= 0].tolist() for row in arrays["tokens"]],
        vocabulary=vocabulary,
        lexicon=lexicon,
        lm=plain_file(options.lm) if options.lm else None,
        word_lm=plain_file(options.word_lm) if options.word_lm else None,
    )


def _read_vocabulary(path: str) -> Vocabulary:
    if Path(path).suffix == ".model":
        return Vocabulary.from_sentencepiece(path)
    return Vocabulary.from_pieces(Path(path).read_text(encoding="utf-8").splitlines())


def _read_lexicon(path: str, pieces: Sequence[str]) -> dict[str, tuple[int, ...]]:
    ids = {piece: i for i, piece in enumerate(pieces)}
    lexicon = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        word, tab, spelling = line.partition("\t")
        unknown = [piece for piece in spelling.split() if piece not in ids]
        if not tab or unknown:
            expected = "word<TAB>piece piece ... with pieces of the tokenizer"
            raise ValueError(f"lexicon is {path!r}, line {number} is {line!r}, expected {expected}")
        lexicon[word] = tuple(ids[piece] for piece in spelling.split())
    return lexicon
