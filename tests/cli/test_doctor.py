"""`doctor` on this machine, and on machines that it only pretends to be on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cli import doctor
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cuda.driver import CudaRuntime
from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.search import self_check
from nemo_gpu_decoding.search.self_check import Verdict


def facts(**options):
    return {fact.name: fact for fact in doctor.examine(**options)}


def test_tables_name_versions_and_strategies(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "flexctc_beam" in out


def test_json_has_the_same_facts(capsys):
    assert main(["doctor", "json=true"]) == 0
    found = {fact["name"]: fact["found"] for fact in json.loads(capsys.readouterr().out)}
    assert found["torch"].startswith(torch.__version__)
    assert {"GPU", "Python", "NeMo", "numba", "NVRTC", "compiled code", "CPU threads"} <= set(found)
    assert found["flexctc_beam"].startswith(("cpu", "cuda"))


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("3.0.0", ""),
        ("2.6.1", "tested with 2.7 .. 3.0"),
        ("4.1.0rc0", "tested with 2.7 .. 3.0"),
        ("not installed", "plain log-probs need none"),
    ],
)
def test_doctor_reports_the_nemo_version(version, advice, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda _: version)
    assert doctor.nemo_fact() == doctor.Fact("NeMo", version, advice)


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


def test_a_missing_driver_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_fact().found == "none"


def test_missing_extras_have_a_row_and_strategies_that_need_them_say_so(monkeypatch):
    assert not [name for name in facts() if name.startswith("[") and name not in ("[cluster]", "[hf]", "[onnx]")]
    monkeypatch.setattr(doctor, "is_installed", lambda module: module not in ("kaldifst", "matplotlib"))
    rows = {fact.name: (fact.found, fact.advice) for fact in doctor.extra_facts()}
    assert rows == {
        "[wfst]": ("no kaldifst", "pip install 'nemo-gpu-decoding[wfst]'"),
        "[plot]": ("no matplotlib", "pip install 'nemo-gpu-decoding[plot]'"),
    }
    rows = facts()
    assert rows["cuda_wfst"].found == rows["paged_biglm"].found == "needs [wfst] or a ready-made graph"
    assert rows["flexctc_beam"].found.startswith(("cpu", "cuda"))


@pytest.fixture
def gpu(monkeypatch):
    """torch as it looks on a machine with one GPU."""
    card = SimpleNamespace(name="Test GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)


def fake_runtime(reason):
    return SimpleNamespace(device_for=lambda device: torch.device("cuda", 0), why_not=lambda device: reason)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("reason", "advice"), [(None, ""), ("the driver is too old", "no CUDA kernels: the driver is too old")]
)
def test_a_gpu_and_why_kernels_do_not_run_on_it(reason, advice):
    with use_runtime(fake_runtime(reason)):
        assert doctor.gpu_facts() == [doctor.Fact("GPU 0", "Test GPU, 80 GiB, sm_90", advice)]
        assert (doctor.usable_gpu() is None) == bool(reason)


def test_without_a_gpu_the_reason_stands_once():
    with use_runtime(fake_runtime("torch is built without CUDA")):
        rows = facts()
    assert rows["GPU"] == doctor.Fact("GPU", "none that torch can use", "torch is built without CUDA")
    assert rows["alsd_pp"] == doctor.Fact("alsd_pp", "cpu")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("verdict", "found", "advice"),
    [
        (None, "cuda", "its kernels are checked before the first decoding"),
        (Verdict(None, 1.5), "cuda, kernels checked in 1.50 s", ""),
        (Verdict("scores differ"), "cpu", "its kernels fail their self-check: scores differ"),
        (RuntimeError("out of memory\nand more"), "cuda", "its kernels can't be checked: out of memory"),
    ],
)
def test_strategy_fact_has_the_verdict_on_the_kernels(check, verdict, found, advice, monkeypatch):
    def answer(*_, **__):
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(self_check, "checked" if check else "kept_verdict", answer)
    fact = doctor.strategy_fact(STRATEGIES["alsd_pp"], torch.device("cuda", 0), check=check)
    assert fact == doctor.Fact("alsd_pp", found, advice)


def test_a_gpu_that_torch_fails_on_is_explained_and_not_raised(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA unknown error\nand a long story")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("current_device", "get_device_properties", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, fail)
    advice = "no CUDA kernels: CUDA does not answer: RuntimeError: CUDA unknown error"
    with use_runtime(CudaRuntime()):
        assert doctor.gpu_facts() == [doctor.Fact("GPU 0", "torch cannot use it", advice)]
    assert doctor.usable_gpu() is None


def test_nvrtc_fact_has_the_version_or_the_failure(monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.cuda.nvrtc.version", lambda: (13, 1))
    assert doctor.nvrtc_fact().found == "13.1"

    def fail():
        raise RuntimeError("no such library")

    monkeypatch.setattr("nemo_gpu_decoding.cuda.nvrtc.version", fail)
    assert doctor.nvrtc_fact().found == "not usable"


def test_a_driver_tool_that_hangs_does_not_hang_doctor(monkeypatch):
    def hang(*_, timeout, **__):
        raise doctor.subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor.driver_fact().found == "nvidia-smi does not answer"


@pytest.mark.parametrize(("folder", "advised"), [("/tmp/x", True), ("/home/me/.cache/x", False)])
def test_compiled_code_in_a_temporary_folder_gets_advice(folder, advised, monkeypatch):
    monkeypatch.setattr("nemo_gpu_decoding.jit.cache_folder", lambda: Path(folder))
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/tmp")
    fact = doctor.compiled_code_fact()
    assert fact.found == folder
    assert ("NEMO_GPU_DECODING_CACHE=FOLDER" in fact.advice) == advised
