from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_gpu_decoding.bench import probe
from nemo_gpu_decoding.bench.probe import measure_memory, measure_start, probe_process
from nemo_gpu_decoding.jit import CACHE_VARIABLE, cache_folder

needs_proc = pytest.mark.skipif(not probe.CLEAR_REFS.exists(), reason="reads Linux's /proc")


@needs_proc
def test_memory_grows_with_frames_and_beam_but_not_with_the_vocabulary(
    tiny_options, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(cache_folder().parent.parent))  # compile nothing anew
    options = replace(
        tiny_options, batch=16, vocab_size=512, min_frames=100, max_frames=200, sentences=50
    )
    result = probe_process("memory", options)  # in a process that has no freed memory to hide it in
    assert set(result["peak_bytes"]) == {str(beam) for beam in probe.MEMORY_BEAMS}
    assert 4 < result["bytes_per_frame_and_slot"] < 64  # the vocabulary would cost 512 * 4


def test_a_system_without_proc_is_told_so(tiny_options, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "CLEAR_REFS", tmp_path / "nothing")
    assert "skipped" in measure_memory(tiny_options)


def test_starting_is_timed_by_its_parts(tiny_options):
    seconds = measure_start(tiny_options)
    assert set(seconds) == {"import", "load_lm", "first_decode"}
    assert all(value >= 0 for value in seconds.values())


def test_a_failing_probe_shows_why(tiny_options, monkeypatch):
    monkeypatch.setattr(probe.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="probe memory failed"):
        probe_process("memory", tiny_options)
