"""`Slots`: utterances that come and go give what they give alone."""

import contextlib

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.live.slots import Slots
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.live.soak import STRATEGIES, SUBJECTS, Report, soak
from tests.random_models import random_lm

V = 6


@pytest.fixture
def decoder():
    return FlexCTCBeam(V, blank_id=V, config=FlexCTCConfig(beam_size=4))


def utterance(seed: int, frames: int) -> torch.Tensor:
    return torch.randn(frames, V + 1, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def same(found, expected) -> bool:
    return [(path.tokens.tolist(), path.score) for path in found] == [
        (path.tokens.tolist(), path.score) for path in expected
    ]


def alone(decoder, log_probs):
    return decoder.decode(log_probs[None], [len(log_probs)])[0]


def test_failed_step_is_rolled_back(decoder):
    slots, log_probs = Slots(decoder, first=2), utterance(1, 9)
    first, second = slots.begin(), slots.begin()
    slots.push({first: log_probs[:3], second: log_probs[:3]})
    bad = torch.full_like(log_probs[:2], torch.nan)
    for attempt in range(3):
        ends = contextlib.nullcontext() if attempt == 2 else pytest.raises(RuntimeError, match="half way")
        with ends, slots.step():
            third = slots.begin()
            assert list(slots.push({first: log_probs[3:], second: bad, third: log_probs})) == [second]
            found = slots.end([first, third])
            if attempt < 2:
                assert len(slots) == 3
                raise RuntimeError("half way")
        assert len(slots) == (1 if attempt == 2 else 2)
    assert all(same(own, alone(decoder, log_probs)) for own in found)
    assert slots.push({second: log_probs[3:]}) == {}
    assert same(slots.end([second])[0], alone(decoder, log_probs))


def test_step_that_fails_at_its_end_is_rolled_back(decoder, monkeypatch):
    slots, log_probs = Slots(decoder, first=2), utterance(1, 9)
    slot, drop = slots.begin(), slots._drop_empty

    def broken_once():
        drop()
        monkeypatch.undo()
        raise MemoryError("injected")

    def step():
        with slots.step():
            slots.push({slot: log_probs})
            return slots.end([slot])

    monkeypatch.setattr(slots, "_drop_empty", broken_once)
    with pytest.raises(MemoryError):
        step()
    assert len(slots) == 1
    assert same(step()[0], alone(decoder, log_probs))


def test_results_of_slots_do_not_depend_on_other_utterances(decoder):
    slots, rng = Slots(decoder, first=2), np.random.default_rng(1)
    running, whole, done, most = {}, {}, 0, 0
    for step in range(60):
        if len(running) < 7 and rng.random() < 0.7:
            slot = slots.begin()
            running[slot], whole[slot] = 0, utterance(step, int(rng.integers(1, 30)))
        most = max(most, len(running))
        chunks = {}
        for slot in running:
            if rng.random() < 0.8:
                chunks[slot] = whole[slot][running[slot] : running[slot] + int(rng.integers(1, 5))]
                running[slot] += len(chunks[slot])
        assert slots.push({slot: chunk for slot, chunk in chunks.items() if len(chunk)}) == {}
        asked = list(reversed(running))
        for slot, partial, final in zip(asked, slots.partial(asked), slots.final(asked), strict=True):
            read = whole[slot][: running[slot]]
            assert partial.num_frames == len(read)
            assert same(final, alone(decoder, read))
        over = [slot for slot in asked if running[slot] == len(whole[slot])]
        for slot, result in zip(over, slots.end(over), strict=True):
            assert same(result, alone(decoder, whole[slot]))
            del running[slot]
            done += 1
        assert len(slots) == len(running)
    assert done > 15
    assert most > 4


def test_capacity_grows_and_shrinks_with_the_utterances(decoder):
    slots = Slots(decoder, first=2)
    first = [slots.begin() for _ in range(2)]
    assert slots.capacity == 2
    more = [slots.begin() for _ in range(3)]
    assert slots.capacity == 8  # 2 + 2 + 4
    slots.abandon(first)
    slots.end(more[:2])
    assert (len(slots), slots.capacity) == (1, 4)
    assert [slots.begin().streams is more[2].streams for _ in range(3)] == [True] * 3


def test_utterances_have_the_lm_of_their_request():
    pool = {name: random_lm(V, seed=seed) for seed, name in enumerate(("a", "b", "c"))}
    fusion = Fusion(random_lm(V, seed=9), 0.5, lm_pool=pool, lm_pool_weights={"b": 0.8})
    decoder = FlexCTCBeam(V, V, FlexCTCConfig(beam_size=4), fusion)
    slots, log_probs = Slots(decoder, first=2), utterance(3, 12)
    requests = [Request(lm=name) for name in ("a", "b", "c", "none")] + [None]
    expected = [decoder.decode(log_probs[None], [12], [request])[0] for request in requests]
    running = {}
    for turn in range(12):  # utterances begin one after the other, in slots of earlier ones
        slot = slots.begin(requests[turn % 5])
        running[slot] = turn % 5
        slots.push({own: log_probs[:6] if own is slot else log_probs[6:] for own in running})
        over = [own for own in running if own is not slot]
        for own, result in zip(over, slots.end(over), strict=True):
            assert same(result, expected[running.pop(own)])
    with pytest.raises(ValueError, match=r"requests\[0\].lm is 'd', expected one of a, b, c, none"):
        slots.begin(Request(lm="d"))
    assert len(slots) == 1
    assert len({each.best.score for each in expected}) == 5


def test_slots_refuse_a_first_size_of_zero(decoder):
    with pytest.raises(ValueError, match="first is 0, expected a number of utterances, >= 1"):
        Slots(decoder, first=0)


# ----------------------------------------------------------------------------- very many utterances
def grows(reports: list[Report]) -> bool:
    """Whether the arrays are larger in the last quarter of the utterances than in the second."""
    _, second, _, last = reports
    return last.array_bytes > 1.1 * second.array_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_thousands_of_utterances_leak_no_memory(strategy):
    reports = list(soak(SUBJECTS[strategy]("cpu"), 2000, slots=64, reports=4))
    assert [report.utterances for report in reports] == [500, 1000, 1500, 2000]
    assert (reports[-1].compared, reports[-1].different) == (40, 0)
    assert not grows(reports)


def test_soak_notices_a_leak(monkeypatch):
    begin, kept = Slots.begin, []

    def leaking(self, request=None):
        kept.append(np.zeros(100))
        self.kept = kept
        return begin(self, request)

    monkeypatch.setattr(Slots, "begin", leaking)
    assert grows(list(soak(SUBJECTS["flexctc_beam"]("cpu"), 400, slots=8, reports=4)))


def test_soak_notices_utterances_that_change_each_other(monkeypatch):
    monkeypatch.setattr(FlexCTCBeam, "reopen", lambda self, streams, rows, requests: streams.set_open(rows, True))
    assert list(soak(SUBJECTS["flexctc_beam"]("cpu"), 100, slots=8, reports=1))[-1].different > 0
