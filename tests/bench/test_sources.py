from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.sources import make_task


@pytest.fixture
def files(tmp_path, tiny_task):
    """The tiny task as files, in the forms that `bench` takes."""
    longest = max(map(len, tiny_task.tokens))
    tokens = [row + [-1] * (longest - len(row)) for row in tiny_task.tokens]
    np.savez(
        tmp_path / "task.npz",
        log_probs=tiny_task.log_probs.numpy(),
        lengths=tiny_task.lengths.numpy(),
        tokens=np.array(tokens),
        texts=np.array(tiny_task.texts),
        frame_seconds=0.08,
    )
    (tmp_path / "pieces.txt").write_text("\n".join(tiny_task.vocabulary.pieces) + "\n")
    lexicon = [
        f"{word}\t{' '.join(tiny_task.vocabulary.pieces[t] for t in ids)}"
        for word, ids in tiny_task.lexicon.items()
    ]
    (tmp_path / "lexicon.txt").write_text("\n".join(lexicon) + "\n")
    (tmp_path / "tok.arpa.gz").write_bytes(gzip.compress(tiny_task.lm.read_bytes()))
    return tmp_path


def options(files, **changes):
    names = {
        "data": "task.npz",
        "tokenizer": "pieces.txt",
        "lexicon": "lexicon.txt",
        "lm": "tok.arpa.gz",
    }
    return BenchOptions(**({key: str(files / name) for key, name in names.items()} | changes))


def test_a_task_from_files_is_the_task(files, tiny_task):
    task = make_task(options(files))
    assert torch.equal(task.log_probs, tiny_task.log_probs)
    assert (task.texts, task.tokens, task.vocabulary.pieces) == (
        tiny_task.texts,
        tiny_task.tokens,
        tiny_task.vocabulary.pieces,
    )
    assert task.lexicon == tiny_task.lexicon
    assert task.lm.read_bytes() == tiny_task.lm.read_bytes()  # unpacked
    assert task.word_lm is None


def test_half_precision_emissions_become_float32(files, tiny_task):
    with np.load(files / "task.npz") as file:
        arrays = dict(file)
    np.savez(files / "half.npz", **arrays | {"log_probs": arrays["log_probs"].astype(np.float16)})
    task = make_task(options(files, data=str(files / "half.npz")))
    assert task.log_probs.dtype == torch.float32


def test_data_without_tokenizer_is_an_error(files):
    with pytest.raises(ValueError, match="tokenizer is None"):
        make_task(options(files, tokenizer=None))


def test_a_tokenizer_of_another_size_is_an_error(files):
    (files / "pieces.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="tokenizer has 2 pieces, expected 32"):
        make_task(options(files))


def test_missing_arrays_are_named(files):
    np.savez(files / "task.npz", log_probs=np.zeros((1, 2, 33)))
    with pytest.raises(ValueError, match="lacks the arrays frame_seconds, lengths, texts, tokens"):
        make_task(options(files))


def test_a_lexicon_with_foreign_pieces_is_an_error(files):
    (files / "lexicon.txt").write_text("word\t▁xyzzy\n")
    with pytest.raises(ValueError, match="line 1"):
        make_task(options(files))


def test_phrases_need_a_lexicon(files):
    with pytest.raises(ValueError, match="lexicon"):
        make_task(options(files, lexicon=None)).phrases(3)
