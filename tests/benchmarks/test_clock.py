"""Clocks, and a run on a GPU with the emulator in its place: all but the GPU's own speed is as there."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import cases as cases_module
from benchmarks import clock as clock_module
from benchmarks import run as run_module
from benchmarks.cases import DECODER, END_TO_END, LM, Check, Line
from benchmarks.clock import Hardware, HostClock, Seconds, find_hardware, summary, time_in_turn, torch_threads
from benchmarks.ours import flexctc_beam
from benchmarks.run import run
from benchmarks.verify import identical
from nemo_gpu_decoding.cuda.availability import why_unavailable
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.transducer import records as transducer_records
from tests.benchmarks.test_run import TWIN, changed
from tests.cuda_emulator.fixtures import emulated_runtime

pytestmark = pytest.mark.slow
pytest.importorskip("kaldialign")
__all__ = ["emulated_runtime"]
HARDWARE = Hardware(torch.device("cpu"), "Emulated GPU", HostClock(), "wall", True, copy_buffer_bytes=1 << 20)


class ScriptedClock:
    """Every call takes what the script says."""

    def __init__(self, *wall, least_seconds=0.0):
        self._wall, self.least_seconds = list(wall), least_seconds
        self.calls = []

    def measure(self, call, calls):
        for _ in range(calls):
            call()
        self.calls.append(calls)
        wall = self._wall.pop(0)
        return Seconds(wall, wall, wall / 2)


# ---------------------------------------------------------------------------------------- the clocks
def test_time_in_turn_alternates_calls():
    order = []
    calls = [lambda: order.append("peer"), lambda: order.append("ours")]
    theirs, ours = time_in_turn(calls, ScriptedClock(8, 1, 6, 3, 4, 2), 3, most_seconds=60)
    assert order == ["peer", "ours"] * 3
    assert summary(theirs)["wall"] == {"median": 6, "min": 4, "max": 8}
    assert summary(ours)["device"] == {"median": 1, "min": 0.5, "max": 1.5}


def test_time_in_turn_repeats_short_calls():
    (taken,) = time_in_turn([lambda: None], ScriptedClock(1), 100, most_seconds=0)
    assert len(taken) == 1
    clock = ScriptedClock(0.001, 0.002, 0.002, least_seconds=0.01)
    (taken,) = time_in_turn([lambda: None], clock, 2, most_seconds=60)
    assert clock.calls == [1, 10, 10]
    assert [seconds.wall for seconds in taken] == [0.002, 0.002]


def test_host_clock_divides_by_the_number_of_calls(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(clock_module.time, "process_time", lambda: float(next(ticks)))
    assert HostClock().measure(lambda: next(ticks), 4).cpu == pytest.approx((4 + 1) / 4)


def test_clock_is_cpu_time_for_one_thread_and_threads_are_restored():
    assert (find_hardware("cpu", 1).ratio_clock, find_hardware("cpu", 2).ratio_clock) == ("cpu", "wall")
    assert find_hardware("cpu", 1).name == clock_module.cpu_name()
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    hardware = Hardware(torch.device("cpu"), "host", ScriptedClock(*[2.0] * 20), copy_buffer_bytes=1000)
    assert hardware.copy_bandwidth() == 2000  # the clock's device time is half of it


# ------------------------------------------------------------------------------------- on a GPU
@pytest.mark.skipif(why_unavailable(torch.device("cuda")) is None, reason="there is a GPU here")
def test_find_hardware_names_the_missing_gpu():
    with pytest.raises(ValueError, match="device is 'cuda', expected cpu or a GPU that runs kernels: "):
        find_hardware("cuda", 1)


@pytest.fixture
def options(tiny_options):
    return replace(
        tiny_options, device="cuda", batches=[1, 2], check_utterances=2, encoder_layers=1,
        encoder_width=16, end_to_end=False, peers=["nemo"],
    )  # fmt: skip


@pytest.fixture
def emulated(emulated_runtime, monkeypatch):
    from nemo_gpu_decoding.search.word_graph import kernel_abi

    for name, size in {"THREADS": 32, "CANDIDATES": 256, "LEAST_GROUPS": 64}.items():
        monkeypatch.setattr(kernel_abi, name, size)
    for name in ("THREADS", "FINISH_THREADS"):
        monkeypatch.setattr(cuda_engine, name, 32)
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(transducer_records, name, 32)
    return emulated_runtime


@pytest.fixture
def measured(options, emulated, monkeypatch):

    def measure(check=Check.EQUAL, ours=flexctc_beam, peer=TWIN, **changes):
        line = Line("flexctc_beam", "nemo", peer, check, ("cuda",), (LM,))
        monkeypatch.setitem(run_module.OURS, "flexctc_beam", ours)
        monkeypatch.setattr(cases_module, "TABLE", (line,))
        return run(replace(options, **changes), HARDWARE)

    return measure


def test_gpu_row_has_all_fields(measured, emulated, tmp_path, capsys):
    first, second = measured(out=str(tmp_path))
    assert emulated.launches > 0
    assert first["verified"]
    assert first["verified_by"].endswith("GPU = CPU to the bit: 1 of 1")
    assert second["verified_by"].endswith("GPU = CPU to the bit: 2 of 2")
    assert (first["part"], first["batch"], second["batch"]) == ("decoder", 1, 2)
    assert first["ratio"] == pytest.approx(first["seconds"]["peer"] / first["seconds"]["ours"])
    assert second["roofline"]["bytes"] > first["roofline"]["bytes"] > 0
    assert second["roofline"]["bytes"] % (33 * 4) == 0  # V + 1 numbers of 4 bytes per frame
    printed = capsys.readouterr().out
    assert "flexctc_beam on Emulated GPU" in printed
    assert "x roofline" in printed
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("flexctc_beam-emulated-gpu-")
    written = json.loads(path.read_text())
    assert written["copy_bandwidth"] > 0
    assert [row["batch"] for row in written["rows"]] == [1, 2]


def test_gpu_row_with_other_results_is_not_verified(measured):
    def impostor(options, task, setting):
        wrong = changed(lambda path: replace(path, score=path.score + 1e-4))
        return (flexctc_beam if options.device == "cpu" else wrong)(options, task, setting)

    row = measured(ours=impostor, batches=[2])[0]
    assert row["verified"] is False
    assert row["verified_by"].endswith("GPU = CPU to the bit: 0 of 2")


def test_identical_compares_paths_to_the_bit(tiny_options, tiny_task):
    decoder = flexctc_beam(tiny_options, tiny_task, run_module.Setting(4, lm=True)).decoder
    first, second = (decoder.decode(tiny_task.inputs, tiny_task.lengths)[0].best for _ in range(2))
    assert identical(first, second)
    assert not identical(first, replace(second, score=second.score + 1e-6))
    assert not identical(first, replace(second, tokens=second.tokens[:-1]))
    assert not identical(first, replace(second, alignment=second.tokens))


# --------------------------------------------------------------------------------------- word graphs
def test_gpu_rows_of_cuda_wfst_beside_kaldi_and_missing_riva(options, emulated, monkeypatch, capsys):
    pytest.importorskip("kaldi_decoder")
    monkeypatch.setitem(sys.modules, "riva", None)  # not found, even if it is installed
    shape = {"graph_beams": [12], "sentences": 300, "max_active": 300, "peers": ["riva", "kaldi_decoder"]}
    rows = run(replace(options, strategy="cuda_wfst", **shape), HARDWARE)
    assert [(row["batch"], row["peer"]) for row in rows] == [
        (batch, peer) for batch in (1, 2) for peer in ("riva", "kaldi_decoder")
    ]
    for row in rows[::2]:
        assert row["skipped"].startswith("riva.asrlib not installed: pip install riva-asrlib-decoder")
        assert "up to 7 times the throughput" in row["skipped"]
        assert row["verified"] is False
    for row, count in zip(rows[1::2], (1, 2), strict=True):
        assert row["verified"], row["verified_by"]
        assert row["verified_by"].startswith(f"equal words and costs: {count} of {count}")
        assert row["verified_by"].endswith(f"GPU = CPU to the bit: {count} of {count}")
        assert row["roofline"]["bytes"] > 0
        assert row["graph"]["ngrams"] > 1000
        assert row["wer"]["ours"] == row["wer"]["peer"]
    assert emulated.launches > 0
    assert "cuda_wfst on Emulated GPU" in capsys.readouterr().out


@pytest.mark.nemo
@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
def test_gpu_rows_of_transducers(options, emulated, strategy):
    pytest.importorskip("nemo.collections.asr")
    rows = run(replace(
        options, strategy=strategy, encoder_width=16, prediction_width=16, batches=[2], phrases=0, max_frames=30,
        end_to_end=True, encoder_precision="float32",
    ), HARDWARE)  # fmt: skip
    assert [row["peer"] for row in rows if row["part"] == END_TO_END] == [
        row["peer"] for row in rows if row["part"] == DECODER
    ]
    measured = [row for row in rows if not row["skipped"] and row["part"] == DECODER]
    expected = {("alsd_pp", "rnnt"): 3, ("alsd_pp", "tdt"): 3, ("aes_pp", "rnnt"): 3, ("aes_pp", "tdt"): 1}
    for kind in ("rnnt", "tdt"):
        assert len([row for row in measured if row["networks"] == kind]) == expected[strategy, kind]
    for row in measured:
        assert row["verified"], row["verified_by"]
        assert row["verified_by"].endswith("GPU = CPU but for rounding: 2 of 2")
        assert (row["part"], row["batch"], row["roofline"]) == (DECODER, 2, None)
    assert emulated.launches > 0
