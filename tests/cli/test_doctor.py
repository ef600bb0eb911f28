"""`doctor` on this machine, and on machines that it only pretends to be on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cli import doctor
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cuda.launch import use_runtime


def facts():
    return {fact.name: fact for fact in doctor.examine()}


def test_tables_name_versions_and_strategies(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "flexctc_beam  CTC, hybrid" in out


def test_json_has_the_same_facts(capsys):
    assert main(["doctor", "json=true"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = {fact["name"]: fact["found"] for fact in answer["facts"]}
    assert found["torch"].startswith(torch.__version__)
    assert {"CUDA kernels", "Python", "NeMo", "numba", "NVRTC", "compiled code", "CPU threads"} <= set(found)
    (strategy,) = [row for row in answer["strategies"] if row["strategy"] == "flexctc_beam"]
    assert strategy["path"] in ("cpu", "cuda")
    assert strategy["why"]


@pytest.mark.parametrize(
    ("version", "found", "advice"),
    [("3.0.0", "3.0.0", ""), ("4.1.0rc0", "4.1.0rc0", "tested with"), (None, "not installed", "pip install")],
)
def test_doctor_reports_the_nemo_version(version, found, advice, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda _: version)
    fact = doctor.nemo_fact()
    assert fact.found == found
    assert advice in fact.advice
    assert bool(advice) == bool(fact.advice)


def test_doctor_reports_registration(monkeypatch):
    assert "registers itself" in doctor.registration_fact().found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    assert doctor.registration_fact().advice == "call nemo_gpu_decoding.register()"

    def no_namespace(_):
        raise ModuleNotFoundError

    monkeypatch.setattr(doctor.importlib.util, "find_spec", no_namespace)
    assert doctor.registration_fact().advice == "call nemo_gpu_decoding.register()"


def fake_tool(tmp_path, monkeypatch, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_driver_version_comes_from_nvidia_smi_whose_failure_is_quoted(tmp_path, monkeypatch):
    fake_tool(tmp_path, monkeypatch, "echo 570.86.10; echo 570.86.10")
    assert doctor.driver_fact().found == "570.86.10"
    fake_tool(tmp_path, monkeypatch, "echo cannot talk to the driver; exit 9")
    fact = doctor.driver_fact()
    assert (fact.found, fact.advice) == ("nvidia-smi fails", "cannot talk to the driver")


def test_missing_driver_and_torch_without_cuda_are_explained(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert doctor.driver_fact().found == "none"
    assert doctor.gpu_advice(cuda_build=True) == "decoding runs on the CPU"
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "nvidia-smi")
    assert "install a CUDA build of torch" in doctor.gpu_advice(cuda_build=False)
    assert "CUDA_VISIBLE_DEVICES" in doctor.gpu_advice(cuda_build=True)


def test_missing_extras_have_a_row_and_strategies_that_need_them_say_so(monkeypatch):
    assert not [name for name in facts() if name.startswith("[") and name not in ("[cluster]", "[hf]", "[onnx]")]
    monkeypatch.setattr(doctor, "is_installed", lambda module: module not in ("kaldifst", "matplotlib"))
    rows = {fact.name: (fact.found, fact.advice) for fact in doctor.extra_facts()}
    assert rows == {
        "[wfst]": ("no kaldifst", "pip install 'nemo-gpu-decoding[wfst]'"),
        "[plot]": ("no matplotlib", "pip install 'nemo-gpu-decoding[plot]'"),
    }
    paths = {row.strategy: row.path for row in doctor.strategy_paths()}
    assert paths["cuda_wfst"] == paths["paged_biglm"] == "needs [wfst]"
    assert paths["flexctc_beam"] in ("cpu", "cuda")


@pytest.fixture
def gpu(monkeypatch):
    """torch as it looks on a machine with one GPU."""
    card = SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)


class FakeRuntime:
    """A runtime with one thing to say."""

    def __init__(self, reason):
        self.reason = reason

    def device_for(self, device):
        return torch.device("cuda", 0)

    def why_not(self, device):
        return self.reason


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("reason", "found", "path"), [(None, "run on the GPU", "cuda"), ("the driver is too old", "not available", "cpu")]
)
def test_a_gpu_and_whether_kernels_run_on_it(reason, found, path):
    with use_runtime(FakeRuntime(reason)):
        (card,) = [fact for fact in doctor.torch_facts() if fact.name == "GPU 0"]
        kernels = doctor.kernels_fact()
        rows = doctor.strategy_paths()
    assert card.found == "Test GPU, 80 GiB, sm_90"
    assert (kernels.found, kernels.advice) == (found, reason or "")
    assert (reason or "") in card.advice
    (row,) = [row for row in rows if row.strategy == "flexctc_beam"]
    assert row.path == path
    assert row.why == (reason or "tensors on the GPU are decoded there")


def test_a_gpu_that_torch_fails_on_is_explained_and_not_raised(monkeypatch):
    def fail():
        raise RuntimeError("CUDA unknown error\nand a long story")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    assert doctor.cuda_obstacle() == "CUDA unknown error"


def test_nvrtc_fact_has_the_version_or_the_failure(monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.cuda.nvrtc.version", lambda: (13, 1))
    assert doctor.nvrtc_fact().found == "13.1"

    def fail():
        raise RuntimeError("no such library")

    monkeypatch.setattr("nemo_gpu_decoding.cuda.nvrtc.version", fail)
    fact = doctor.nvrtc_fact()
    assert fact.found == "not usable"
    assert "RuntimeError" in fact.advice


def test_a_driver_tool_that_hangs_does_not_hang_doctor(monkeypatch):
    def hang(*_, timeout, **__):
        raise doctor.subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(doctor.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor.driver_fact().found == "nvidia-smi does not answer"


@pytest.mark.parametrize(("folder", "advised"), [("/tmp/x", True), ("/home/me/.cache/x", False)])
def test_compiled_code_in_a_temporary_folder_gets_advice(folder, advised, monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.jit.cache_folder", lambda: Path(folder))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/tmp")
    fact = doctor.numba_facts()[1]
    assert fact.found == folder
    assert ("NEMO_GPU_DECODING_CACHE=FOLDER" in fact.advice) == advised
