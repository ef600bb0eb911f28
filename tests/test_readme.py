"""Every snippet of the README runs, from the root of the repository."""

import re
import subprocess

import pytest

from nemo_gpu_decoding.cli.main import main
from tests.assets import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip() for kind, text in SNIPPETS if kind == "bash" for line in text.split("\n")
]

QUICK_COMMANDS = [c for c in COMMANDS if " tune " not in c]  # test_readme_figures.py has the other


def test_all_kinds_of_snippets_are_known():
    assert {kind for kind, _ in SNIPPETS} <= {"python", "bash"}


@pytest.mark.nemo
@pytest.mark.parametrize("code", [text for kind, text in SNIPPETS if kind == "python"])
def test_python_snippet(code, monkeypatch, capsys):
    if "nemo.collections" in code:
        pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.nemo
@pytest.mark.parametrize("command", [c for c in QUICK_COMMANDS if c.startswith("nemo-gpu-decoding ")])
def test_command(command, monkeypatch, capsys):
    pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(ROOT)
    (ROOT / "build").mkdir(exist_ok=True)  # as `make demo` leaves it
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_target_exists(command):
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_no_other_commands():
    assert all(c.startswith(("make ", "nemo-gpu-decoding ")) for c in COMMANDS if c)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_point_to_something(target):
    assert (ROOT / target).exists()
