"""Every snippet of the README runs, and every tutorial; the figures are those of the records."""

import json
import re
import subprocess
import sys

import pytest

from nemo_gpu_decoding.cli.main import main
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
RESULTS = ROOT / "docs" / "results"
NEMO_TABLE = {  # what a row says -> peer, LM, phrases
    "NeMo 3.0.0 `beam_batch`": ("nemo", False, 0),
    "NeMo 3.0.0 `beam_batch` + LM": ("nemo", True, 0),
    "NeMo 3.0.0 `beam_batch` + LM + 200 phrases": ("nemo", True, 200),
    "flashlight-text 0.0.7, lexicon-free + LM": ("flashlight", True, 0),
    "pyctcdecode 0.5.0 + word LM": ("pyctcdecode", True, 0),
    "pyctcdecode 0.5.0 + word LM + 200 hotwords": ("pyctcdecode", True, 200),
}


def record(strategy):
    """The one record that the README links."""
    (name,) = re.findall(rf"\(docs/results/({strategy}-amd[^)]*\.json)\)", README)
    return json.loads((RESULTS / name).read_text())


def table_row(label):
    """The cells right of the first one; one row of all tables begins with it."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("label", NEMO_TABLE)
def test_rows_of_flexctc_beam(label):
    peer, lm, phrases = NEMO_TABLE[label]
    rows = [
        row
        for row in record("flexctc_beam")["rows"]
        if row["peer"] == peer and (row["peer_params"]["lm"], row["peer_params"]["phrases"]) == (lm, phrases)
    ]
    *ratios, how, wer = table_row(label)
    assert [row["params"]["beam_size"] for row in rows] == [4, 8, 16]
    assert all(row["verified"] for row in rows)
    for ratio, row in zip(ratios, rows, strict=True):
        assert float(ratio.rstrip("x")) == pytest.approx(row["ratio"], rel=0.02)
    assert how == ("equal hypotheses" if peer == "nemo" else "WER not worse")
    assert wer == " / ".join(f"{rows[-1]['wer'][who]:.1f}" for who in ("peer", "ours"))


def test_sentences_about_flexctc_beam():
    record_ = record("flexctc_beam")
    ratios = {(row["peer"], row["params"]["phrases"]): row["ratio"] for row in record_["rows"]}
    memory = record_["probes"]["memory"]["bytes_per_frame_and_slot"]
    for said in (
        f"takes {1 / ratios['nemo_greedy', 0]:.1f} times the CPU seconds of NeMo's `greedy_batch`",
        f"phrases cost {1 / ratios['flexctc_beam', 20000]:.2f} times what 10 cost",
        f"Memory is {memory:.1f} bytes per frame and hypothesis",
    ):
        assert said in README.replace("\n", " ")


@pytest.mark.parametrize("beam", [10, 13, 17, 25])
def test_rows_of_cuda_wfst(beam):
    (row,) = [r for r in record("cuda_wfst")["rows"] if r["params"]["beam_size"] == beam]
    ratio, how, rtfx, wer = table_row(str(beam))
    assert row["verified"]
    assert float(ratio.rstrip("x")) == pytest.approx(row["ratio"], abs=0.05)
    assert how == "equal words and costs"
    assert rtfx == f"{row['rtfx']['peer']:,.0f} / {row['rtfx']['ours']:,.0f}"
    assert wer == f"{row['wer']['ours']:.1f}" == f"{row['wer']['peer']:.1f}"


@pytest.mark.parametrize(("strategy", "peer"), [("alsd_pp", "nemo_malsd"), ("aes_pp", "nemo_maes")])
def test_rows_of_transducers(strategy, peer):
    shown = 0
    for row in record(strategy)["rows"]:
        params = row["params"]
        if row["peer"] != peer or row["skipped"] or params["lm"] < bool(params["phrases"]):
            continue  # not in the table: skipped ones, phrases without an LM
        kind = {"rnnt": "RNN-T", "tdt": "TDT"}[row["networks"]]
        fusion = " + LM" * params["lm"] + f" + {params['phrases']} phrases" * bool(params["phrases"])
        name = peer.replace("nemo_", "") + "_batch"
        cells = table_row(f"{kind} `{strategy}` / `{name}`{fusion}")
        assert row["verified"]
        assert cells[[4, 8].index(params["beam_size"])] == f"{row['ratio']:.1f}x"
        shown += 1
    assert shown == {"alsd_pp": 12, "aes_pp": 4}[strategy]


def test_latencies_of_streams():
    rows = [row for row in record("cuda_wfst-stream")["rows"] if row["streams"] == 256]
    plain, with_texts = ([1000 * row["latency"]["total"][k] for k in ("mean", "p99")] for row in rows)
    said = README.replace("\n", " ")
    assert f"mean latency {plain[0]:.1f} ms, p99 {plain[1]:.1f} ms" in said
    assert f"with each stream's partial text {with_texts[0]:.1f} and {with_texts[1]:.1f} ms" in said


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
