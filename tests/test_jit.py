import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from numba.core import errors
from numba.core.caching import IndexDataCacheFile, UserProvidedCacheLocator

from nemo_gpu_decoding import jit
from tests.test_container import disk_is_full


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    jit.cache_folder.cache_clear()
    monkeypatch.setattr(jit, "_warned", set())
    yield
    jit.cache_folder.cache_clear()


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


def test_cache_folder_is_private_under_any_umask(monkeypatch, tmp_path):
    """With the umask of systems where everybody has a group of their own."""
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    before = os.umask(0o002)
    try:
        assert jit.cache_folder().is_relative_to(tmp_path)
        jit.cache_folder.cache_clear()
        assert jit.cache_folder().is_relative_to(tmp_path)
    finally:
        os.umask(before)


def doubled(value):
    return 2 * value


def warnings_of(caplog):
    return [message for message in caplog.messages if "cannot be used" in message]


@pytest.fixture
def cache(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(jit.CACHE_VARIABLE, str(tmp_path))
    caplog.set_level(logging.WARNING, logger="nemo_gpu_decoding")
    return jit.cache_folder()


@pytest.mark.parametrize("when", ["decorated", "saved"])
def test_full_disk_gives_one_warning_and_no_cache(when, cache, monkeypatch, caplog):
    if when == "decorated":
        monkeypatch.setattr(UserProvidedCacheLocator, "ensure_cache_path", disk_is_full)
    else:
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", disk_is_full)
    assert [jit.compiled(doubled)(2), jit.no_refcount(doubled)(2.5)] == [4, 5.0]
    (warning,) = warnings_of(caplog)
    assert str(cache) in warning


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_cache_entry_is_compiled_again_with_one_warning(ending, cache, caplog):
    assert jit.compiled(doubled)(2) == 4
    (file,) = cache.rglob(f"*.{ending}")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert jit.compiled(doubled)(2) == 4
    (warning,) = warnings_of(caplog)
    assert str(cache) in warning
    caplog.clear()
    again = jit.compiled(doubled)
    assert again(2) == 4
    assert sum(again.stats.cache_hits.values()) == 1
    assert not warnings_of(caplog)


def test_linked_function_raises_if_python_calls_it(cache):
    part = jit.linked(doubled)

    def whole(value):
        return part(value) + 1

    assert jit.no_refcount(whole)(3) == 7
    with pytest.raises(SystemError):
        part(3)  # its types are compiled now


def test_a_linked_function_that_returns_arrays_is_refused(cache):
    """A caller that counts references would free an array that nothing has counted."""
    part = jit.linked(lambda pair: (1, pair[0]))

    def whole(pair):
        return part(pair)[0]

    with pytest.raises((TypeError, errors.NumbaError), match="expected no arrays"):
        jit.no_refcount(whole)((np.zeros(2), 1))


def test_compiling_is_announced_once_and_only_if_needed(cache, monkeypatch, caplog):
    monkeypatch.setattr(jit, "_is_ours", lambda event: True)
    monkeypatch.setattr(jit.compilation, "_announced", set())
    monkeypatch.setattr(jit.compilation, "purpose", "")
    jit.announce_compilation("flexctc_beam")
    assert not caplog.records
    assert [jit.compiled(doubled)(value) for value in (2, 2.0)] == [4, 4.0]
    (record,) = caplog.records
    assert "compiling flexctc_beam (once per machine" in record.getMessage()
    assert str(cache) in record.getMessage()
    jit.announce_compilation("aes_pp")
    caplog.clear()
    assert jit.compiled(doubled)(2) == 4  # from the cache
    assert not caplog.records


def test_time_of_compilation_is_no_working_time(cache, monkeypatch):
    monkeypatch.setattr(jit, "_is_ours", lambda event: True)
    compiled, counted, began = (jit.compilation.seconds, jit.compilation.count, jit.working_seconds())
    all_began = time.perf_counter()
    jit.compiled(doubled)(2)
    spent = jit.compilation.seconds - compiled
    assert spent > 0
    assert jit.compilation.count == counted + 1
    worked = jit.working_seconds() - began
    assert worked <= time.perf_counter() - all_began - spent + 1e-3


def test_compilations_of_other_packages_are_not_announced(cache):
    before = jit.compilation.count, jit.compilation.seconds
    jit.linked(doubled).compile("int64(int64)")
    assert (jit.compilation.count, jit.compilation.seconds) == before


def test_functions_name_the_switch_that_turns_numba_off(monkeypatch):
    """Plain Python cannot read the fields of records by their names."""
    monkeypatch.setattr(jit.config, "DISABLE_JIT", True)
    for make in (jit.compiled, jit.linked, jit.no_refcount, jit.inlined):
        with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT is set, expected unset: doubled"):
            make(doubled)(2)


@pytest.mark.slow
def test_later_processes_do_not_compile(monkeypatch, tmp_path):
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
