"""What the joint gave in the last step is not computed again, and nothing else comes of it."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.transducer.schedule import JointRows
from tests.contract.facts import facts
from tests.search.transducer.table_networks import (
    STRATEGIES,
    TableNetworks,
    random_frames,
    random_fusion,
)

V, T = 12, 30
LENGTHS = [T, 0, 17]


class Counting(TableNetworks):
    """Counts the rows that the joint is asked for."""

    rows = 0

    def join(self, frames, predictions):
        self.rows += len(frames)
        return super().join(frames, predictions)


def decoded(strategy, durations, chunk=T):
    """(facts of the n-best lists, rows of the joint)"""
    make, config = STRATEGIES[strategy]
    networks = Counting(V, durations, seed=3, blank_bias=2.0)
    decoder = make(networks, config(beam_size=6, n_best=6), random_fusion(V))
    networks.rows = 0  # construction has tried the networks
    frames = random_frames(3, T, seed=2)
    streams = decoder.open(3)
    for begin in range(0, T, chunk):
        sizes = [max(0, min(length - begin, chunk)) for length in LENGTHS]
        decoder.push(streams, frames[:, begin : begin + chunk], sizes)
    return [facts(nbest) for nbest in decoder.close(streams)], networks.rows


@pytest.fixture
def without_reuse(monkeypatch):
    """What `decoded` returns if every row is computed."""

    def forgetting(self, *arguments):
        self._kept.rows.fill(-1)
        return read(self, *arguments)

    read = JointRows.read

    def decoded_anew(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(JointRows, "read", forgetting)
            return decoded(*arguments)

    return decoded_anew


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4), (4, 2, 1)], ids=str)
def test_the_hypotheses_are_the_same(without_reuse, strategy, durations):
    expected, all_rows = without_reuse(strategy, durations)
    found, rows = decoded(strategy, durations)
    assert found == expected
    if strategy == "alsd_pp" and durations:
        assert rows < all_rows
    else:  # hypotheses of aes_pp wait for each other in a frame, and those of an RNN-T never meet late
        assert rows == all_rows


def test_chunks_forget_nothing_that_matters():
    durations = (0, 1, 2, 3, 4)
    assert decoded("alsd_pp", durations, chunk=4)[0] == decoded("alsd_pp", durations)[0]
