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


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder for temporary files, in which others can write; the cache cannot be where it should."""
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(jit.CACHE_VARIABLE, "/dev/null")
    (tmp_path / "theirs").mkdir()
    return tmp_path


def test_what_we_put_into_a_temporary_folder_is_for_us_alone(temporary):
    folder = jit.cache_folder()
    assert folder.is_relative_to(temporary)
    assert folder.parent.stat().st_mode & 0o077 == 0
    jit.cache_folder.cache_clear()
    assert jit.cache_folder() == folder  # kept between runs


@pytest.mark.parametrize("hands", ["everybody's", "the group's", "a link", "another's", "everybody's inside"])
def test_compiled_code_of_others_is_not_run(temporary, monkeypatch, caplog, hands):
    """Who may write a folder of compiled code has its users run theirs."""
    known = jit.cache_folder()
    jit.cache_folder.cache_clear()
    if hands == "everybody's":
        known.parent.chmod(0o777)
    elif hands == "the group's":
        known.parent.chmod(0o770)
    elif hands == "everybody's inside":
        known.chmod(0o777)
    elif hands == "a link":
        known.rmdir()
        known.symlink_to(temporary / "theirs")
    else:
        user = jit._user()
        monkeypatch.setattr(jit, "_user", lambda: user + 1)
        known.parent.rename(known.parent.with_name(f"nemo-gpu-decoding-{user + 1}"))
    with caplog.at_level(logging.WARNING, logger="nemo_gpu_decoding"):
        folder = jit.cache_folder()
    assert folder.is_relative_to(temporary)
    assert folder.stat().st_mode & 0o077 == 0
    assert "others can write" in caplog.text
    assert folder.parent == temporary  # one for this process alone


def test_a_cache_that_everybody_can_write_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    own = jit.cache_folder()
    jit.cache_folder.cache_clear()
    own.chmod(0o777)
    assert not jit.cache_folder().is_relative_to(tmp_path / "nemo_gpu_decoding")


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
