"""The self-check: the emulated kernels pass it, faulty ones do not; its verdict is kept; faults of a GPU are named."""

import logging
import multiprocessing
import re
import sys
from pathlib import Path

import pytest
import torch

from nemo_gpu_decoding.cuda import compile as kernels
from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.search import self_check
from nemo_gpu_decoding.search.built_in_problems import PROBLEMS, first_difference, verdict_on
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.self_check import KERNELS, Verdict, why_distrusted
from nemo_gpu_decoding.search.word_graph import cuda_engine
from tests.cuda_emulator import build, emulator
from tests.random_models import random_log_probs
from tests.search.mutants import MUTANTS, Mutant
from tests.search.test_backend import FakeRuntime

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORK = multiprocessing.get_context("fork")


# --------------------------------------------------------------------------------------- problems
def test_every_strategy_with_kernels_has_problems():
    assert PROBLEMS.keys() == KERNELS.keys()
    assert {name.split("/")[1] for name in kernels.kernel_files()} == set(KERNELS.values())


@pytest.fixture
def full_arrays(monkeypatch):
    """Few back-pointers of word graphs, as in the process of a check."""
    monkeypatch.setattr(cuda_engine, "FIRST_BACK_POINTERS", 64)


@pytest.mark.usefixtures("full_arrays")
@pytest.mark.parametrize("strategy", PROBLEMS)
def test_correct_kernels_pass_the_self_check(strategy, emulated_runtime, small_blocks, monkeypatch):
    launched, launch = set(), emulator.EmulatedModule.launch

    def noted(module, *given, **named):
        launched.add(module.source)
        launch(module, *given, **named)

    monkeypatch.setattr(emulator.EmulatedModule, "launch", noted)
    assert first_difference(strategy, CPU) is None
    others = {"alsd_pp": "search/transducer/aes.cu", "aes_pp": "search/transducer/alsd.cu"}
    folder = f"search/{KERNELS[strategy]}/"
    assert launched == {name for name in kernels.kernel_files() if name.startswith(folder)} - {others.get(strategy)}


def with_mutant(mutant: Mutant, folder: Path, monkeypatch) -> None:
    """Let the emulator compile the kernels of a copy of the package with this fault."""
    for path in [*kernels.PACKAGE.rglob("*.cu"), *kernels.PACKAGE.rglob("*.cuh")]:
        name, text = path.relative_to(kernels.PACKAGE), path.read_text()
        if name.as_posix() == mutant.file:
            assert text.count(mutant.old) == 1
            text = text.replace(mutant.old, mutant.new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "PACKAGE", folder)
    monkeypatch.setattr(emulator, "PACKAGE", folder)


@pytest.mark.slow
@pytest.mark.usefixtures("full_arrays")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_fault_in_a_kernel_is_found(mutant, emulated_runtime, small_blocks, tmp_path, monkeypatch):
    with_mutant(mutant, tmp_path, monkeypatch)
    check = FORK.Process(target=lambda: sys.exit(0 if verdict_on(mutant.strategy, CPU).difference else 3))
    check.start()
    check.join(300)
    status = check.exitcode
    check.kill()
    assert status is None or status <= 0  # a faulty kernel may also hang, or end its process


def test_first_difference_is_named(monkeypatch, emulated_runtime, small_blocks):
    rescored = CPUEngine.results

    def better(*place, **named):
        hypotheses = rescored(*place, **named)
        hypotheses.scores[:] += 1.0
        return hypotheses

    monkeypatch.setattr(CPUEngine, "results", better)
    message = first_difference("flexctc_beam", CPU)
    assert re.fullmatch(r"problem 1, result 0, score of hypothesis 0 is -[\d.]+, on the CPU -[\d.]+", message)


# --------------------------------------------------------------------------------------- verdicts
@pytest.fixture
def checks(monkeypatch, tmp_path):
    """Verdicts of the next checks on a machine with one GPU; each check takes one."""
    for name, value in {"get_device_capability": (9, 0), "get_device_name": "Test GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(kernels, "architecture", lambda capability: kernels.Architecture(90))
    monkeypatch.setattr(kernels.nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(self_check, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(self_check, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan\nGCC version:\n"
    )
    monkeypatch.setattr(kernels, "kernel_cache", lambda: tmp_path / "cubin")
    monkeypatch.setattr(self_check, "_reasons", {})
    waiting: list[Verdict | None] = []
    monkeypatch.setattr(self_check, "_in_a_process", lambda strategy, device: waiting.pop(0))
    return waiting


def new_process(monkeypatch):
    monkeypatch.setattr(self_check, "_reasons", {})


FAILURE = (
    "the CUDA kernels of flexctc_beam fail their self-check on Test GPU (sm_90, driver for CUDA 13.0): "
    "scores differ; please report this with the output of `nemo-gpu-decoding doctor check=true`"
)


@pytest.mark.parametrize(("difference", "reason"), [(None, None), ("scores differ", FAILURE)])
def test_strategy_is_checked_once_per_machine(difference, reason, checks, monkeypatch, caplog):
    checks += [Verdict(difference, 0.5)]
    for _ in range(2):
        for _ in range(2):
            assert why_distrusted("flexctc_beam", GPU) == reason
        new_process(monkeypatch)
    assert not checks
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [FAILURE] * (2 if reason else 0)


def test_other_kernels_drivers_and_versions_are_checked_again(checks, monkeypatch):
    def is_checked_again() -> bool:
        checks[:] = [Verdict(None)]
        new_process(monkeypatch)
        assert why_distrusted("flexctc_beam", GPU) is None
        return not checks

    assert is_checked_again()
    assert not is_checked_again()
    read = kernels.read_source
    monkeypatch.setattr(kernels, "read_source", lambda name: _changed(read(name)))
    assert is_checked_again()
    assert not is_checked_again()
    self_check.DRIVER.unlink()
    assert is_checked_again()
    monkeypatch.setattr(self_check, "__version__", "99.0")
    assert is_checked_again()


def _changed(source):
    return kernels.Source(source.name, source.text + "// changed", source.headers)


def test_verdict_without_a_result_is_not_kept(checks, monkeypatch):
    checks += [Verdict("ends with exit code -9", is_kept=False), Verdict(None)]
    assert "ends with exit code -9" in why_distrusted("cuda_wfst", GPU)
    new_process(monkeypatch)
    assert why_distrusted("cuda_wfst", GPU) is None


def test_damaged_verdict_is_replaced(checks, monkeypatch, tmp_path):
    checks += [Verdict(None), Verdict(None)]
    assert why_distrusted("cuda_wfst", GPU) is None
    (kept,) = (tmp_path / "self_check").glob("*.json")
    kept.write_text('{"difference": nu')
    new_process(monkeypatch)
    assert why_distrusted("cuda_wfst", GPU) is None
    assert not checks


def test_gpu_that_admits_one_process_is_checked_in_this_one(checks, monkeypatch):
    checks += [None]
    monkeypatch.setattr("nemo_gpu_decoding.search.built_in_problems.verdict_on", lambda *place: Verdict(f"{place}"))
    assert "flexctc_beam" in why_distrusted("flexctc_beam", GPU)


def test_process_without_a_gpu_gives_no_verdict():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert self_check._in_a_process("flexctc_beam", GPU) is None


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ('print(\'{"difference": null, "seconds": 0.5, "is_kept": true}\')', Verdict(None, 0.5)),
        (
            'exit("Segmentation fault")',
            Verdict("the process of the check ends with 1: Segmentation fault", is_kept=False),
        ),
        ("print('null')", None),
    ],
)
def test_verdict_comes_from_a_new_process(script, verdict, monkeypatch):
    run = self_check.subprocess.run
    monkeypatch.setattr(self_check.subprocess, "run", lambda old, **options: run([old[0], "-c", script], **options))
    assert self_check._in_a_process("flexctc_beam", GPU) == verdict


def test_process_that_hangs_fails_the_check(monkeypatch):
    run = self_check.subprocess.run
    command = ["-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(self_check, "LONGEST", 0.5)
    monkeypatch.setattr(self_check.subprocess, "run", lambda given, **options: run([given[0], *command], **options))
    assert self_check._in_a_process("flexctc_beam", GPU).difference == "no result after 0 seconds"


# --------------------------------------------------------------------------------------- decoders
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_strategy_that_fails_is_decoded_by_the_cpu_or_refused(backend, checks):
    checks += [Verdict("scores differ")]
    decoder = FlexCTCBeam(5, 5, FlexCTCConfig(backend=backend))
    with use_runtime(FakeRuntime(None)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "_why_not_cuda", lambda streams, device: None)
        if backend == "cuda":
            with pytest.raises(ValueError, match="expected 'cpu' or 'auto': the CUDA kernels of flexctc_beam fail"):
                decoder.open(1, device=GPU)
        else:
            assert isinstance(decoder.open(1, device=GPU).engine, CPUEngine)


@pytest.mark.parametrize("place", ["push", "results"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("CUDA error: bad address"), "flexctc_beam stops on the GPU: CUDA error: bad address\nRestart"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "^flexctc_beam stops on the GPU: CUDA out of memory.$"),
        (RuntimeError("a module fails"), "^a module fails$"),
    ],
)
def test_fault_of_the_gpu_names_the_strategy(place, error, message, monkeypatch):
    def fail(*args, **named):
        raise type(error)(*error.args)

    monkeypatch.setattr(CPUEngine, place, fail)
    with pytest.raises(type(error), match=message):
        FlexCTCBeam(5, 5).decode(random_log_probs(1, 4, 6, seed=0))
