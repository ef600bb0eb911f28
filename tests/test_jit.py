import logging
import os
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


def test_a_temporary_folder_is_kept_between_runs_and_is_of_one_user(temporary, monkeypatch):
    folder = jit.cache_folder()
    assert folder.parent == temporary
    jit.cache_folder.cache_clear()
    assert jit.cache_folder() == folder
    assert f"-{jit._user()}-" in folder.name


@pytest.mark.parametrize("place", ["temporary", "chosen"])
@pytest.mark.parametrize("hands", ["everybody's", "the group's", "a link", "another's"])
def test_compiled_code_of_others_is_not_run(place, hands, temporary, monkeypatch, caplog):
    """Who may write a folder of compiled code has its users run theirs."""
    if place == "chosen":
        monkeypatch.setenv(jit.CACHE_VARIABLE, str(temporary / "chosen"))
    known = jit.cache_folder()
    jit.cache_folder.cache_clear()
    if hands == "everybody's":
        known.chmod(0o757)
    elif hands == "the group's":
        known.chmod(0o775)
    elif hands == "a link":
        known.rmdir()
        known.symlink_to(temporary / "theirs")
    else:
        user = jit._user()
        monkeypatch.setattr(jit, "_user", lambda: user + 1)
        if place == "temporary":
            known.rename(known.with_name(known.name.replace(f"-{user}-", f"-{user + 1}-")))
    with caplog.at_level(logging.WARNING, logger="nemo_gpu_decoding"):
        folder = jit.cache_folder()
    assert folder != known
    assert not folder.is_symlink()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o022 == 0
    assert "not ours alone to write" in caplog.text


def test_a_folder_is_ours_alone_whatever_new_files_are_allowed(monkeypatch, tmp_path):
    """With the umask of systems where everybody has a group of their own."""
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    before = os.umask(0o002)
    try:
        assert jit.cache_folder().is_relative_to(tmp_path)
        jit.cache_folder.cache_clear()
        assert jit.cache_folder().is_relative_to(tmp_path)
    finally:
        os.umask(before)


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
