"""The kernels, run by the emulator, find what the CPU finds: to the bit, whatever the options."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.inputs import rows_in_shared_memory
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, on_cuda, random_fusion

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]

V, T = 20, 25
MERGES = ("max", "sum", "prefix")


@pytest.fixture
def log_probs():
    return random_log_probs(3, T, V + 1, seed=1)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("kind", ["none", "lm", "boosting", "both"])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_every_fusion_and_merge_mode_equals_the_cpu(merge, kind, sharpness):
    for seed in range(3):
        assert_equal(
            random_log_probs(3, T, V + 1, seed=seed, sharpness=sharpness), [T, 11, 18],
            fusion=random_fusion(V, kind, seed), merge=merge, beam_size=8, n_best=8, beam_beta=0.5,
        )  # fmt: skip


@pytest.mark.parametrize("merge", MERGES)
def test_large_scores_are_subtracted_as_on_the_cpu(log_probs, merge):
    values = log_probs - 300.0  # a beam has 4096 after 14 frames
    assert_equal(values, [T, 11, 18], fusion=random_fusion(V), merge=merge, beam_size=8, n_best=8)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("beam_size", [1, 2, 3, 16, 33, 128])
def test_kernel_of_any_beam_size_equals_the_cpu(log_probs, merge, beam_size):
    assert_equal(
        log_probs[:2, :12], [12, 7], fusion=random_fusion(V), merge=merge,
        beam_size=beam_size, n_best=min(beam_size, 40),
    )  # fmt: skip


@pytest.mark.parametrize("threshold", [0.1, 2.0, float("inf")])
def test_kernel_with_any_threshold_equals_the_cpu(log_probs, threshold):
    for merge in MERGES:
        assert_equal(log_probs, [T] * 3, fusion=random_fusion(V), merge=merge, beam_threshold=threshold, n_best=4)


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 500])
def test_kernel_of_any_vocabulary_size_equals_the_cpu(vocab_size):
    fusion = random_fusion(vocab_size)
    for merge in MERGES:
        assert_equal(random_log_probs(2, 8, vocab_size + 1, seed=4), [8, 5], fusion=fusion, merge=merge, n_best=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab_size", [12, 13, 14, 15, 16, 17])
def test_kernel_for_any_type_and_address_of_rows_equals_the_cpu(dtype, vocab_size):
    """Rows of any length begin at any address, and are fetched in pieces of 16 bytes all the same."""
    log_probs = random_log_probs(2, 9, vocab_size + 1, seed=5).to(dtype)
    assert_equal(log_probs[1:], [9], fusion=random_fusion(vocab_size), n_best=3)


def test_lm_that_forbids_labels_and_ends_equals_the_cpu():
    columns = Columns(
        arc_begin=[0, 1], arc_end=[1, 3], backoff_to=[0, 0], backoff_weights=[-np.inf] * 2,
        final_weights=[-np.inf] * 2, arc_labels=[1, 0, 1], arc_weights=[-0.5, -1.0, -2.0], arc_targets=[1, 0, 1],
    )  # fmt: skip
    lm = BackoffAutomaton.from_columns(columns, vocab_size=3, start_state=0)
    for merge in MERGES:
        assert_equal(random_log_probs(2, 8, 4, seed=2), [8, 8], fusion=Fusion(lm, 0.5), merge=merge, n_best=4)


@pytest.mark.parametrize("threads", [32, 64, 160])
def test_kernel_with_any_block_size_equals_the_cpu(log_probs, monkeypatch, threads):
    monkeypatch.setattr(cuda_engine, "THREADS", threads)
    monkeypatch.setattr(cuda_engine, "FINISH_THREADS", threads)
    for merge in MERGES:
        assert_equal(log_probs, [T, 3, 9], fusion=random_fusion(V), merge=merge, n_best=8)


@pytest.mark.parametrize("labels", [1, 7, 100])
@pytest.mark.parametrize("pairs", [1, 33])
def test_short_candidate_lists_equal_the_cpu(monkeypatch, labels, pairs):
    """Flat posteriors, no threshold: more labels, pairs and candidates than the lists hold at once."""
    monkeypatch.setattr(cuda_engine, "MAX_LABELS", labels)
    monkeypatch.setattr(cuda_engine, "MAX_PAIRS", pairs)
    log_probs = random_log_probs(1, 6, 61, seed=7, sharpness=0.3)
    for merge in MERGES:
        assert_equal(
            log_probs, [6], fusion=random_fusion(60), merge=merge, beam_size=16,
            beam_threshold=float("inf"), n_best=16,
        )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_many_rows_as_fit_are_in_shared_memory(emulated_runtime, rows, dtype):
    """GPUs with 64 KB have room for one row of 8,192 numbers, and others for two."""
    columns, beam_size = 1003, 4  # rows of all alignments
    _, _, most = cuda_engine.list_sizes(beam_size, columns, dtype.itemsize, emulated_runtime.most_shared_bytes)
    row_bytes = rows_in_shared_memory(columns, dtype.itemsize, most)[1] // 2
    emulated_runtime.most_shared_bytes = most - (2 - rows) * row_bytes + row_bytes // 2
    assert cuda_engine.list_sizes(beam_size, columns, dtype.itemsize, emulated_runtime.most_shared_bytes)[1] == rows
    log_probs = random_log_probs(3, 5, columns, seed=8, sharpness=3.0).to(dtype)
    for merge in MERGES:
        assert_equal(log_probs, [5, 1, 4], merge=merge, beam_size=beam_size, n_best=4)


def test_rows_that_exceed_shared_memory_are_read_where_they_lie(emulated_runtime):
    most, columns = emulated_runtime.most_shared_bytes, 70_000
    assert cuda_engine.list_sizes(8, columns, 4, most)[1] == 0
    assert cuda_engine.list_sizes(8, columns, 1, most)[1] > 0
    for merge in MERGES:
        assert_equal(random_log_probs(2, 3, columns, seed=8, sharpness=3.0), [3, 2], merge=merge, n_best=4)


def test_too_large_beam_is_refused(log_probs):
    with pytest.raises(ValueError, match=r"backend is 'cuda' for tensors on cpu, .*: a beam of 4096"):
        on_cuda(V, V, beam_size=4096).decode(log_probs, [T] * 3)
    assert cuda_engine.why_not(128, 2**24, 10**9) is None
    assert "exceed the 2^32" in cuda_engine.why_not(129, 2**24, 10**9)
