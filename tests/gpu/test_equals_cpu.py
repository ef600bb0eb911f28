"""The GPU finds what the CPU finds: tokens, times, confidence and scores, to the bit."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from tests.gpu import sized
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, random_fusion

MERGES = ("max", "sum", "prefix")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
V = sized(400, 20)
T = sized(120, 12)


def log_probs_on(device, batch, frames=T, vocab_size=V, *, seed, sharpness=2.0, dtype=torch.float32):
    return random_log_probs(batch, frames, vocab_size + 1, seed=seed, sharpness=sharpness).to(device, dtype)


def lengths_for(batch, frames=T, *, seed):
    """Any lengths, the longest and an empty one among them."""
    lengths = np.random.default_rng(seed).integers(0, frames + 1, batch)
    lengths[0] = frames
    lengths[-1] = frames if batch == 1 else 0
    return lengths.tolist()


@pytest.mark.parametrize("merge", MERGES)
def test_more_utterances_than_multiprocessors(device, merge):
    on_gpu = device.type == "cuda"
    batch = 2 * (torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1) + 37
    log_probs, lengths = log_probs_on(device, batch, seed=7), lengths_for(batch, seed=7)
    assert_equal(log_probs, lengths, fusion=random_fusion(V), merge=merge, beam_size=sized(16, 3), n_best=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", sized((70_000, 131_071, 262_144), (30_000,)))
def test_rows_that_do_not_fit_into_shared_memory(device, vocab_size, dtype):
    most = runtime().shared_bytes(device)
    _, rows, _ = cuda_engine.list_sizes(16, vocab_size + 1, dtype.itemsize, most)
    if vocab_size * dtype.itemsize > most:
        assert rows == 0
    frames = sized(12, 2)
    for merge in MERGES:
        assert_equal(
            log_probs_on(device, 3, frames, vocab_size, seed=8, sharpness=4.0, dtype=dtype),
            [frames, 1, 0],
            fusion=random_fusion(vocab_size, "boosting"),
            merge=merge,
            beam_size=sized(16, 4),
            n_best=4,
        )


@pytest.mark.parametrize("seed", range(sized(150, 6)))
def test_random_shapes_and_options_equal_the_cpu(device, seed):
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(1, sized(1500, 40)))
    batch, frames = int(rng.integers(1, sized(40, 4))), int(rng.integers(1, sized(150, 10)))
    beam_size = int(rng.integers(1, sized(129, 9)))
    kind = str(rng.choice(["none", "lm", "boosting", "both"]))
    fusion = random_fusion(vocab_size, kind if vocab_size < 800 else "boosting", seed)
    weights = (float(w) for w in rng.uniform(0.0, 2.0, 2))
    assert_equal(
        log_probs_on(
            device, batch, frames, vocab_size, seed=seed, sharpness=float(rng.uniform(0.2, 6.0)),
            dtype=DTYPES[rng.integers(len(DTYPES))],
        ),
        lengths_for(batch, frames, seed=seed),
        blank_id=int(rng.integers(0, vocab_size + 1)),
        fusion=Fusion(fusion.lm, next(weights), fusion.boosting, next(weights)),
        merge=str(rng.choice(MERGES)),
        beam_size=beam_size,
        n_best=int(rng.integers(1, beam_size + 1)),
        beam_beta=float(rng.normal()),
        beam_threshold=float(rng.choice([1.0, 10.0, 30.0, np.inf])),
    )  # fmt: skip
