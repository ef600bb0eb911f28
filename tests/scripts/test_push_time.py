"""The script that measures the host time of pushes."""

import time

import pytest

from nemo_gpu_decoding.search.decoder import Decoder
from scripts import push_time
from tests.cuda_emulator.build import why_no_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler() or "there is a compiler"),
]


@pytest.mark.parametrize("strategy", list(push_time.STRATEGIES))
def test_host_time_has_the_work_of_a_push(strategy, monkeypatch):
    if strategy in ("cuda_wfst", "paged_biglm"):
        pytest.importorskip("kaldifst")
    push = Decoder.push

    def slow(*given, **options):
        time.sleep(0.02)
        return push(*given, **options)

    monkeypatch.setattr(Decoder, "push", slow)
    of_push, of_step = push_time.host_time(strategy, 2, pushes=5, warm_up=2)
    assert of_push > 20_000
    assert (of_step is not None) == (strategy in ("alsd_pp", "aes_pp"))
    assert of_step is None or 0 < of_step < 20_000


def test_time_that_is_left_out_is_not_measured():
    clock = push_time.Clock()
    begin = clock.now()
    with clock.leave_out(), clock.leave_out():
        time.sleep(0.05)
    assert clock.now() - begin < 0.04
