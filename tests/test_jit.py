import logging
import subprocess
import sys

import pytest

from nemo_gpu_decoding import jit


@pytest.fixture(autouse=True)
def forget():
    caches = (jit.cache_folder, jit.announce_compilation)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    folder = jit.cache_folder()
    assert folder.is_relative_to(tmp_path)
    assert folder.is_dir()


def test_a_cache_that_cannot_be_made_goes_to_a_temporary_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path / "file"))
    assert jit.cache_folder().is_dir()


def test_compiling_is_announced_once_and_only_if_needed(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="nemo_gpu_decoding"):
        jit.announce_compilation()
        jit.announce_compilation()
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    (jit.cache_folder() / "something.nbi").touch()
    jit.announce_compilation.cache_clear()
    caplog.clear()
    jit.announce_compilation()
    assert not caplog.records


@pytest.mark.slow
def test_later_processes_do_not_compile(monkeypatch, tmp_path):
    """The first process fills the cache, the second adds nothing to it."""
    code = (
        "import torch; from nemo_gpu_decoding import FlexCTCBeam;FlexCTCBeam(2, 2).decode(torch.zeros(1, 3, 3), [3])"
    )
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    sizes = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        sizes.append({p.name: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb*")})
    assert sizes[0]
    assert sizes[0] == sizes[1]
