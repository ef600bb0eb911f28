"""The load run of the live server, in simulated time."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import live_load

for library in ("starlette", "uvicorn", "websockets", "prometheus_client"):
    pytest.importorskip(library)

pytestmark = pytest.mark.slow
OPTIONS = live_load.LoadOptions(clients=6, seconds=20.0, killed=0.3, speed=1.0, simulated=True)


def test_hostile_clients_over_sockets():
    import asyncio

    from websockets.asyncio.client import connect

    from nemo_gpu_decoding.live.interface import Limits
    from tests.live.test_server import audio, counted, running

    options = replace(OPTIONS, seconds=4.0, hostile=3, simulated=False)
    load = live_load.Load(options, [np.frombuffer(audio(*[n] * 150), "<i2") for n in (1, 2, 3)])
    load.texts = [" ".join([str(n)] * 150) for n in (1, 2, 3)]
    with running(limits=Limits(max_streams=16)) as server:
        url = server.url.replace("http", "ws") + "stream"

        async def metric(name):
            return counted(server, name)

        row = asyncio.run(load.run(lambda: connect(url, compression=None), metric))
    assert row["attacks"] > len(live_load.ATTACKS)
    assert [row[fault] for fault in ("lost", "other texts", "left")] == [0, 0, 0]
    assert counted(server, "streams_total", outcome="server") == 0
    for outcome in ("end_silence", "sample_rate", "n_best", "phrases", "boosting_weight", "audio", "message"):
        assert counted(server, "streams_total", outcome=outcome) > 0, outcome


def test_simulation_counts_lost_and_wrong_texts():
    from nemo_gpu_decoding.live.batcher import Batcher
    from nemo_gpu_decoding.live.interface import Address, Limits
    from nemo_gpu_decoding.live.server import LiveServer
    from tests.live.test_server import NumberReader, audio

    server = LiveServer(Batcher(NumberReader(), Limits()), Address(port=0))
    load = live_load.Load(OPTIONS, [np.frombuffer(audio(*[n] * 150), "<i2") for n in (1, 2, 3)])
    load.texts = [" ".join(["1"] * 150), "another text", " ".join(["3"] * 150)]
    step, broken = server.batcher.recognizer.step, []

    def failing(chunks):
        if not broken and len(load.delays) > 500:
            broken.append(chunks[0].stream)
        if any(chunk.stream in broken for chunk in chunks):
            raise RuntimeError("the model is broken")
        return step(chunks)

    server.batcher.recognizer.step = failing
    row = live_load.simulate(server, load)
    assert 0 < row["other texts"] < row["utterances"]
    assert row["lost"] == 1


@pytest.mark.parametrize(("slope", "grew"), [(0.0, False), (1.0, True), (0.005, False)])
def test_memory_growth_after_the_warm_up_is_reported(slope, grew):
    load = live_load.Load(OPTIONS, [])
    load.memory = [(t, 1000 + min(t, 60.0) + slope * t) for t in np.arange(0.0, 600.0)]
    row = load._memory_growth()
    assert row["grew"] is grew
    assert row["MB per min"] == pytest.approx(60 * slope, abs=0.01)
    load.memory = load.memory[:100]
    assert load._memory_growth()["grew"] is False  # it was too short to tell


@pytest.mark.nemo
def test_live_load_smoke_run():
    pytest.importorskip("nemo.collections.asr.inference")
    import numba
    import torch

    threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        row = live_load.in_simulated_time("flexctc_beam", replace(OPTIONS, clients=8))
    finally:
        torch.set_num_threads(threads[0])
        numba.set_num_threads(threads[1])
    assert row["utterances"] > 20
    assert row["killed"] > 5
    assert [row[fault] for fault in ("lost", "other texts", "left", "grew")] == [0, 0, 0, False]
