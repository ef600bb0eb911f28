"""`python -m benchmarks`: help, options, and what it says where a package is missing."""

import importlib.util
import subprocess
import sys

import pytest

from benchmarks import __main__ as command
from benchmarks import cluster_scale, live_load, sources
from benchmarks import run as run_module
from nemo_gpu_decoding.cli.options import options_of
from tests.assets import ROOT

pytestmark = pytest.mark.slow
PROGRAMS = {"benchmarks": command, "benchmarks.live_load": live_load, "benchmarks.cluster_scale": cluster_scale}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_explains_every_option(name):
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    program, options = PROGRAMS[name], options_of(PROGRAMS[name].OPTIONS)
    assert done.stdout.startswith(f"python -m {name}: {program.SUMMARY}\n")
    assert all(f"  {option.name}=" in done.stdout and option.comment for option in options)
    keys = {part.split("=")[0] for example in program.EXAMPLES for part in example.split()}
    assert keys <= {option.name for option in options}


def test_a_simulated_cluster_needs_the_seconds_of_its_driver():
    with pytest.raises(ValueError, match="driver is null, expected seconds per partition, or ray=true"):
        cluster_scale.run(cluster_scale.ScaleOptions())


# ------------------------------------------------------------------------------------ missing packages
@pytest.mark.parametrize(
    ("arguments", "package", "message"),
    [
        ([], "safetensors", "the task hard needs safetensors, which is not installed: pip install '.[bench]'"),
        (["mode=live"], "safetensors", "the task hard needs safetensors"),
        (["strategy=cuda_wfst"], "kaldifst", "strategy=cuda_wfst needs kaldifst, which is not installed"),
        (["mode=scale", "strategy=paged_biglm"], "kaldifst", "pip install '.[wfst]'"),
        (["mode=cluster", "tasks=[peaked]"], "ray", "mode=cluster needs ray, which is not installed"),
        (["strategy=alsd_pp"], "nemo", "strategy=alsd_pp has no row without its peers: nemo not installed: pip"),
    ],
)
def test_a_missing_package_is_named_before_any_work(arguments, package, message, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n.split(".")[0] == package else find(n))
    monkeypatch.setattr(run_module, "make_tasks", lambda options: pytest.fail("a task was made"))
    monkeypatch.setattr(sources, "cached", lambda *given: pytest.fail("an LM was made"))
    assert command.main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_seconds_of_compilation_are_reported():
    command = [sys.executable, "-m", "benchmarks.compile_seconds", "flexctc_beam"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    name, _, _, _, seconds, _, functions, microseconds, _ = shown.splitlines()[1].split()
    assert name == "flexctc_beam"
    assert float(seconds) > 0.5  # the cache was empty
    assert int(functions) > 10
    assert 10 < float(microseconds) < 1e4
