"""Where a search runs: the choice of the backend, and of threads. Options out of range are named."""

import logging
import os

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.search import engine
from nemo_gpu_decoding.search.engine import for_each_share, thread_count
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
from tests.random_models import random_log_probs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeRuntime:
    def __init__(self, reason):
        self.reason = reason

    def device_for(self, device):
        return GPU

    def why_not(self, device):
        assert device == GPU
        return self.reason


def nothing(device):
    return None


@pytest.fixture
def said(caplog):
    engine._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="nemo_gpu_decoding"):
        yield lambda: list(caplog.messages)
    engine._say_once.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [("auto", GPU, "cuda"), ("cuda", GPU, "cuda"), ("cuda", CPU, "cuda"),
     ("auto", CPU, "cpu"), ("cpu", CPU, "cpu"), ("cpu", GPU, "cpu")],
)  # fmt: skip
def test_backend_auto_takes_kernels_where_they_run(wanted, device, chosen):
    with use_runtime(FakeRuntime(None)):
        assert engine.choose_backend(wanted, device, nothing) == chosen


@pytest.mark.parametrize(
    ("reason", "obstacle", "why"),
    [
        ("the driver is too old", nothing, "the driver is too old"),
        (None, lambda device: "a beam of 4096 is too large", "a beam of 4096 is too large"),
    ],
)
def test_reason_against_kernels_is_logged_once(said, reason, obstacle, why):
    with use_runtime(FakeRuntime(reason)):
        for _ in range(3):
            assert engine.choose_backend("auto", GPU, obstacle) == "cpu"
        with pytest.raises(ValueError, match=f"backend is 'cuda' for tensors on cpu, .*: {why}"):
            engine.choose_backend("cuda", CPU, obstacle)
    assert said() == [f"backend cpu for tensors on cuda:0, which are copied to the host: {why}"]


def test_chosen_backend_is_logged_once(said):
    with use_runtime(FakeRuntime(None)):
        for _ in range(3):
            engine.choose_backend("auto", GPU, nothing)
            engine.choose_backend("auto", CPU, nothing)
    assert said() == [
        "backend cuda for tensors on cuda:0 (option backend=auto)",
        "backend cpu for tensors on cpu (option backend=auto)",
    ]


def test_cpu_tensors_load_no_cuda_runtime(monkeypatch):
    monkeypatch.setattr(engine, "runtime", lambda: pytest.fail("the CUDA runtime is loaded"))
    assert engine.choose_backend("auto", CPU, nothing) == "cpu"
    assert engine.choose_backend("cpu", GPU, nothing) == "cpu"


# --------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_row_with_work_is_done_once(threads):
    costs = np.array([5, 0, 3, 9, 1, 0, 2])
    shares = []
    for_each_share(lambda rows: shares.append(rows.tolist()), costs, threads)
    assert sorted(row for share in shares for row in share) == [0, 2, 3, 4, 6]
    assert len(shares) == min(threads, 5)


def test_shares_are_balanced_and_none_is_without_work():
    loads = []
    costs = np.array([10, 10, 5, 5, 5, 5])
    for_each_share(lambda rows: loads.append(costs[rows].sum()), costs, 2)
    assert loads == [20, 20]
    for_each_share(lambda rows: pytest.fail("called"), np.zeros(3), 2)


@pytest.mark.parametrize("guilty", [0, 3])
def test_an_error_in_any_share_is_raised(guilty):
    def work(rows):
        if guilty in rows:
            raise KeyError("found")

    with pytest.raises(KeyError, match="found"):
        for_each_share(work, np.array([9, 5, 5, 1]), 2)


def test_zero_threads_are_as_many_as_torch_uses(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    assert thread_count(0) == 7
    assert thread_count(3) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_decodes():
    """As a DataLoader's workers do: the parent's threads do not exist in the child."""
    decoder = FlexCTCBeam(5, 5, FlexCTCConfig(beam_size=4, threads=2))
    log_probs = random_log_probs(4, 10, 6, seed=0)
    expected = [nbest.best.score for nbest in decoder.decode(log_probs, [10] * 4)]
    child = os.fork()
    if child == 0:  # the exit code is all that the parent learns
        scores = [nbest.best.score for nbest in decoder.decode(log_probs, [10] * 4)]
        os._exit(0 if scores == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# --------------------------------------------------------------------- Options out of range are named
TRANSDUCERS = [
    ({"beam_size": 0}, "beam_size is 0, expected an integer 1 .."),
    ({"n_best": 5}, "n_best is 5, expected an integer 1 .. 4"),
    ({"threads": -1}, "threads is -1"),
    ({"softmax_temperature": 0.0}, "softmax_temperature is 0.0, expected a finite number > 0"),
    ({"blank_lm_score_mode": "full"}, "blank_lm_score_mode is 'full', expected one of no_score"),
    ({"pruning_mode": "LATE"}, "pruning_mode is 'LATE', expected one of late, early"),
    ({"backend": "tpu"}, "backend is 'tpu'"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *((kind, *row) for kind in (ALSDConfig, AESConfig) for row in TRANSDUCERS),
        *((ALSDConfig, {"max_symbols": n}, f"max_symbols is {n}, expected an integer 1") for n in (0, -3)),
        (AESConfig, {"maes_num_steps": 0}, "maes_num_steps is 0"),
        (AESConfig, {"maes_expansion_beta": -1}, "maes_expansion_beta is -1"),
        (AESConfig, {"maes_expansion_gamma": 0.0}, "maes_expansion_gamma is 0.0, expected a number > 0"),
        (FlexCTCConfig, {"beam_size": 0}, r"beam_size is 0, expected an integer 1 \.\. 4096"),
        (FlexCTCConfig, {"beam_size": 4, "n_best": 5}, r"n_best is 5, expected an integer 1 \.\. 4"),
        (FlexCTCConfig, {"threads": -1}, "threads is -1"),
        (FlexCTCConfig, {"beam_beta": float("nan")}, "beam_beta is nan, expected a finite number"),
        (FlexCTCConfig, {"beam_threshold": 0.0}, r"beam_threshold is 0\.0, expected a number > 0"),
        (FlexCTCConfig, {"merge": "avg"}, "merge is 'avg', expected one of max, sum, prefix"),
        (FlexCTCConfig, {"backend": "gpu"}, "backend is 'gpu', expected one of auto, cuda, cpu"),
    ],
)
def test_bad_options_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_decoder_for_another_model_is_named():
    with pytest.raises(ValueError, match="alignments is True with merge='prefix'"):
        FlexCTCBeam(3, 3, FlexCTCConfig(merge="prefix", alignments=True))
    with pytest.raises(ValueError, match="vocab_size is 0, expected an integer >= 1"):
        FlexCTCBeam(0, 0)
