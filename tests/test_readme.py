"""Every snippet of the README runs, and every tutorial; the figures are those of the records."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from tests.assets import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in SNIPPETS if kind == "bash" for line in text.split("\n")]
QUICK_COMMANDS = [c for c in COMMANDS if " tune " not in c]  # the other is below


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


# ----------------- The figures of the README are those of the records, and of the command beside them


@pytest.fixture
def records():
    spec = importlib.util.spec_from_file_location("records", ROOT / "docs" / "results" / "records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_of_the_records(records):
    assert README.count("<!-- records: ") == len(records.WRITERS)
    assert records.with_figures(README) == README, "python docs/results/records.py readme"


def test_another_record_gives_other_figures(records, tmp_path, monkeypatch):
    for path, _ in records.records().values():
        record = records.read(path)
        for row in [row for row in record["rows"] if row.get("ratio")]:
            row["ratio"] *= 10
            record["rows"].append({**row, "task": "speech" + row["task"].removeprefix("synthetic"), "ratio": 7.04})
        (tmp_path / path.name).write_text(json.dumps(record))
    monkeypatch.setattr(records, "HERE", tmp_path)
    text = records.with_figures(README)
    (line,) = re.findall(r"^\| NeMo \S+ `beam_batch` \| (.*) \|$", text, re.MULTILINE)
    ratio = next(row for row in records.records()["flexctc_beam"][1]["rows"] if row["peer"] == "nemo")["ratio"]
    cells = line.split(" | ")
    assert cells[0] == f"{ratio:.0f}x"
    assert cells[3:7] == ["7.0x", "7.0x", "7.0x", "equal hypotheses"]
    assert "| hard, K=4 |" in text


def test_rows_that_are_not_verified_give_no_figures(records, tmp_path, monkeypatch):
    for path, record in records.records().values():
        record["rows"][0]["verified"] = False
        (tmp_path / path.name).write_text(json.dumps(record))
    monkeypatch.setattr(records, "HERE", tmp_path)
    with pytest.raises(ValueError, match="has a row that is not verified"):
        records.with_figures(README)


def test_a_new_record_takes_the_place_of_the_old_one(records, tmp_path, monkeypatch):
    for path, record in records.records().values():
        (tmp_path / path.name).write_text(json.dumps(record))
    readme = tmp_path / "README.md"
    readme.write_text(README)
    monkeypatch.setattr(records, "HERE", tmp_path)
    monkeypatch.setattr(records, "README", readme)
    monkeypatch.setattr(records, "plot_rows", lambda *given: None)
    old, record = records.records()["aes_pp"]

    def bench(command, check):
        options = parse_options(BenchOptions, command[command.index("bench") + 1 :])
        assert (options.strategy, options.mode, options.out) == ("aes_pp", "batch", str(tmp_path))
        (tmp_path / "new.json").write_text(json.dumps({**record, "date": "2099-01-01"}))

    monkeypatch.setattr(records.subprocess, "run", bench)
    records.main("measure", "aes_pp")
    assert not old.exists()
    assert "[rows](docs/results/new.json) of aes_pp" in readme.read_text()


def test_runs_are_options_of_bench(records):
    for options in records.RUNS.values():
        parse_options(BenchOptions, options.split())


def table_row(label):
    """The cells right of the first one; one row of all tables begins with it."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.nemo
def test_the_deletion_table_is_what_its_command_prints(monkeypatch, capsys):
    pytest.importorskip("nemo.collections.asr")
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^nemo-gpu-decoding (tune .*)$", README, re.MULTILINE)
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    for mode, label in (("lm_weighted_full", "RNN-T `alsd_pp`"), ("no_score", "RNN-T `alsd_pp`, `no_score`")):
        printed = re.findall(rf"^{mode} +[\d.]+ +([\d.]+) +\d+ +(\d+) +\d+$", out, re.MULTILINE)
        said = [re.fullmatch(r"([\d.]+) \((\d+)\)", cell).groups() for cell in table_row(label)]
        for (wer, deletions), (wer_said, deletions_said) in zip(printed, said, strict=True):
            # sums of floats differ between machines, and may turn a word
            assert float(wer) == pytest.approx(float(wer_said), abs=0.5)
            assert int(deletions) == pytest.approx(int(deletions_said), abs=3)


# ------------------------------------------------ Every tutorial runs from its first cell to its last

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.nemo
def test_there_are_tutorials():
    assert TUTORIALS


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, monkeypatch):
    pytest.importorskip("nemo.collections.asr")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpecManager

    # the kernel of this very interpreter, whatever kernels the machine has registered
    spec = KernelSpecManager().get_kernel_spec("python3")
    monkeypatch.setattr(spec, "argv", [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: spec)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": path.parent}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
