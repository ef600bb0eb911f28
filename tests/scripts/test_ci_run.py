"""`.ci/run`: what it runs, where, and what it says, with a `make` that does nothing."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.assets import ROOT

MAKE = r"""
import json, os, pathlib, sys
target = sys.argv[1]
home = sorted(os.listdir(os.environ["HOME"]))
with open(os.environ["LOG"], "a") as log:
    log.write(json.dumps([target, os.getcwd(), home, os.environ.get("XDG_CACHE_HOME")]) + "\n")
if target == "demo" and os.environ["PICTURE"] == "yes":
    pathlib.Path("build").mkdir()
    pathlib.Path("build/demo.png").write_text("a picture")
sys.exit(target == os.environ["FAILS"])
"""


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of `.ci/run` in a folder with nothing else: what it returned, and what `make` was called for."""
    clone, tools, home = tmp_path / "clone", tmp_path / "tools", tmp_path / "home"
    for folder in (clone / ".ci", tools, home / "files"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", clone / ".ci" / "run")
    (tools / "make.py").write_text(MAKE)
    make = tools / "make"
    make.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tools}/make.py" "$@"\n')
    make.chmod(0o755)
    log = tmp_path / "log"

    def run(fails="", picture="yes"):
        env = {
            **os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "LOG": str(log),
            "XDG_CACHE_HOME": str(home), "TMPDIR": str(tmp_path), "FAILS": fails, "PICTURE": picture,
        }  # fmt: skip
        done = subprocess.run(["bash", clone / ".ci" / "run"], env=env, capture_output=True, text=True, check=False)
        return done, [json.loads(line) for line in log.read_text().splitlines()]

    return run


def test_the_demo_and_both_tiers_run_in_a_copy(ci):
    done, calls = ci()
    assert done.returncode == 0, done.stderr
    assert [target for target, *_ in calls] == ["demo", "test", "test-all"]
    assert all(folder.endswith("/Käse Box/clone") for _, folder, *_ in calls)
    assert [home for *_, home, _ in calls] == [[], ["files"], ["files"]]
    assert calls[0][-1] is None
    assert re.findall(r"^make (\S+) +passed after +\d+ s$", done.stdout, re.M) == ["demo", "test", "test-all"]
    assert not os.path.exists(calls[0][1])


@pytest.mark.parametrize("target", ["demo", "test", "test-all"])
def test_a_failure_is_named_and_the_rest_runs(ci, target):
    done, calls = ci(fails=target)
    assert done.returncode == 1
    assert len(calls) == 3
    assert done.stderr == f"make {target} failed, see above\n"
    assert re.search(rf"^make {target} +failed after", done.stdout, re.M)


def test_a_demo_without_a_picture_has_failed(ci):
    done, _ = ci(picture="no")
    assert (done.returncode, done.stderr) == (1, "make demo failed, see above\n")
