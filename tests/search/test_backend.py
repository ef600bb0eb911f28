import logging

import pytest
import torch

from nemo_gpu_decoding.search import backend


def test_cpu_tensors_are_decoded_on_the_cpu():
    for wanted in ("auto", "cpu"):
        assert backend.choose_backend(wanted, torch.device("cpu")) == "cpu"


def test_gpu_tensors_without_kernels_are_said_once_and_decoded_on_the_cpu(caplog):
    backend._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="nemo_gpu_decoding"):
        for _ in range(3):
            assert backend.choose_backend("auto", torch.device("cuda", 0)) == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "backend cpu for log_probs on cuda:0: this version has no CUDA kernels yet; "
        "they are copied to the host"
    ]


def test_asking_for_kernels_that_do_not_exist_is_an_error():
    with pytest.raises(
        ValueError, match="backend is 'cuda' for log_probs on cpu, expected 'cpu' or 'auto'"
    ):
        backend.choose_backend("cuda", torch.device("cpu"))
