import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_gpu_decoding import cache
from nemo_gpu_decoding.cache import cached, file_key


@pytest.fixture(autouse=True)
def _empty_cache():
    cache._entries.clear()
    yield
    cache._entries.clear()


def test_cache_builds_once_per_key():
    built = []
    for key in ("a", "a", "b", "a"):
        cached(key, lambda key=key: built.append(key))
    assert built == ["a", "b"]
    assert cached("outer", lambda: cached("inner", lambda: 1) + 1) == 2


def test_concurrent_callers_share_one_build():
    built = []

    def build():
        time.sleep(0.05)
        built.append(1)
        return object()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: cached("key", build), range(8)))
    assert len(built) == 1
    assert len(set(map(id, results))) == 1


def test_a_failed_build_is_reported_and_not_kept():
    def fail():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cached("key", fail)
    assert cached("key", lambda: "fine") == "fine"


def test_least_recently_used_entry_is_dropped_first(monkeypatch):
    monkeypatch.setattr(cache, "MAX_ENTRIES", 2)
    cached("a", lambda: "a")
    cached("b", lambda: "b")
    cached("a", lambda: "unused")
    cached("c", lambda: "c")
    assert cached("a", lambda: "again") == "a"
    assert cached("b", lambda: "again") == "again"


def test_file_key_changes_with_the_file(tmp_path):
    path = tmp_path / "lm"
    path.write_text("one")
    first = file_key(path)
    assert file_key(str(path)) == first
    path.write_text("other")
    assert file_key(path) != first
    second = file_key(path)
    os.utime(path, ns=(0, 0))
    assert file_key(path) != second
    with pytest.raises(FileNotFoundError):
        file_key(tmp_path / "none")


# ------------------------------------------------------------------------ shared by processes of a machine
def test_file_lock_waits_only_for_living_processes(tmp_path):
    code = """
import sys, time
from pathlib import Path
from nemo_gpu_decoding.cache import one_process_at_a_time
with one_process_at_a_time(Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(60)
"""
    pytest.importorskip("fcntl")
    lock = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"here\n"
        entered = threading.Event()

        def enter():
            with cache.one_process_at_a_time(lock):
                entered.set()

        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.3)
        assert cache.is_held(lock)
        other.kill()
        assert entered.wait(10)
        waiting.join()
    assert not cache.is_held(lock)
