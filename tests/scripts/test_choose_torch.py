"""Which torch `make setup` takes."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "choose_torch.py"


@pytest.fixture
def choose_torch(monkeypatch):
    """The script, on a Linux machine without torch and without a GPU."""
    spec = importlib.util.spec_from_file_location("choose_torch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "installed_torch", lambda: None)
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    return module


def pip_answers(module, monkeypatch, stdout):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, stdout, "")

    monkeypatch.setattr(module.subprocess, "run", run)


def test_the_newest_cpu_build_is_taken_even_if_cuda_builds_are_newer(choose_torch, monkeypatch, capsys):
    versions = "2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1+cpu, 2.10.0+cpu, 2.14.0+cu130, 2.0.0+cpu"
    pip_answers(choose_torch, monkeypatch, f"torch (2.15.0)\nAvailable versions: {versions}\n")
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == "torch==2.13.0+cpu\n"


@pytest.mark.parametrize("versions", ["2.15.0, 2.14.0", "2.5.1+cpu, 2.15.0"])
def test_only_cuda_or_old_cpu_builds_stop_with_advice(choose_torch, versions, monkeypatch, capsys):
    pip_answers(choose_torch, monkeypatch, f"Available versions: {versions}\n")
    assert choose_torch.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "make setup TORCH=torch " in err
    assert versions in err


def test_an_index_that_cannot_be_read_stops_too(choose_torch, monkeypatch, capsys):
    pip_answers(choose_torch, monkeypatch, "")
    assert choose_torch.main() == 1
    assert "no torch at all" in capsys.readouterr().err


def test_with_a_gpu_or_on_another_system_plain_torch_is_right(choose_torch, monkeypatch, capsys):
    monkeypatch.setattr(choose_torch.platform, "system", lambda: "Darwin")
    assert choose_torch.main() == 0
    monkeypatch.setattr(choose_torch.platform, "system", lambda: "Linux")
    monkeypatch.setattr(choose_torch, "has_nvidia_gpu", lambda: True)
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == "torch>=2.6\n" * 2


def test_an_installed_torch_stays(choose_torch, monkeypatch, capsys):
    monkeypatch.setattr(choose_torch, "installed_torch", lambda: "2.7.1+cu126")
    assert choose_torch.main() == 0
    assert capsys.readouterr().out == "torch==2.7.1+cu126\n"
