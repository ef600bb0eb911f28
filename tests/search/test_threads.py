import os

import numpy as np
import pytest

from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.threads import for_each_share, thread_count
from tests.random_models import random_log_probs


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_row_with_work_is_done_once(threads):
    costs = np.array([5, 0, 3, 9, 1, 0, 2])
    shares = []
    for_each_share(lambda rows: shares.append(rows.tolist()), costs, threads)
    assert sorted(row for share in shares for row in share) == [0, 2, 3, 4, 6]
    assert len(shares) == min(threads, 5)


def test_shares_are_balanced():
    loads = []
    costs = np.array([10, 10, 5, 5, 5, 5])
    for_each_share(lambda rows: loads.append(costs[rows].sum()), costs, 2)
    assert loads == [20, 20]


def test_nothing_to_do():
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
def test_a_forked_child_decodes_too():
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
