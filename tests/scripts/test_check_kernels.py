"""Scripts that look at kernels without a GPU: one compiles them all and refuses spills, one counts."""

import re
import subprocess

import pytest

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import read_source
from tests.assets import ROOT, load_script
from tests.cuda.marks import needs_nvrtc
from tests.cuda_emulator.build import why_no_compiler
from tests.cuda_emulator.emulator import Counts, EmulatedRuntime, Launched

SCRIPT = ROOT / "scripts" / "check_kernels.py"
GOOD = """// variants: SIZE=32
// variants: SIZE=64 TYPE=int
// variants: SIZE=96 arch>=90
#ifndef TYPE
#define TYPE float
#endif
extern "C" __global__ void good(TYPE* x) {
  __shared__ TYPE row[SIZE];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[SIZE - 1 - threadIdx.x];
}
"""
# 96 numbers per thread and 64 registers to keep them in
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(float* x, int n) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = x[i * n];
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * n + 1] = kept[i] * kept[(i * 7 + 3) % 96];
}
"""
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'advance' for 'sm_90'
ptxas info    : Function properties for advance
ptxas         .     24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 78 registers, used 1 barriers, 24 bytes cumulative stack size, 48 bytes smem
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'finish' for 'sm_90'
ptxas info    : Function properties for finish
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""


@pytest.fixture
def check_kernels(tmp_path, monkeypatch):
    """The script, on a package of kernels of our own."""
    module = load_script(SCRIPT)
    monkeypatch.setattr(module, "read_source", lambda name: read_source(name, tmp_path))
    monkeypatch.setattr(module, "kernel_files", lambda: sorted(path.name for path in tmp_path.glob("*.cu")))
    return module


def test_registers_and_spills_are_read_from_the_report(check_kernels):
    usage = check_kernels.Usage
    assert check_kernels.usages(LOG) == [
        usage("advance", True, registers=78, shared=48, stack=24, spills=20),
        usage("helper", False, spills=4),
        usage("finish", True, registers=32),
    ]


@needs_nvrtc
def test_every_variant_is_compiled_for_every_architecture(check_kernels, tmp_path, capsys):
    (tmp_path / "good.cu").write_text(GOOD)
    assert check_kernels.main(["--arch", "80", "90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("good.cu")]
    assert [row[1:-4] for row in rows] == [
        ["SIZE=32", "good", "sm_80"],
        ["SIZE=64", "TYPE=int", "good", "sm_80"],
        ["SIZE=32", "good", "sm_90"],
        ["SIZE=64", "TYPE=int", "good", "sm_90"],
        ["SIZE=96", "good", "sm_90"],
    ]
    assert [int(row[-3]) % 1024 for row in rows] == [128, 256, 128, 256, 384]  # sm_90 may reserve 1 KiB
    assert lines[-1] == "all kernels compile, none spills"


@needs_nvrtc
@pytest.mark.parametrize(
    ("files", "arch", "shown"),
    [
        ({"good.cu": GOOD, "spills.cu": SPILLS}, "90", ["spills.cu: spills spills on sm_90\n"]),
        ({"bad.cu": "\nint x = y;\n", "good.cu": GOOD}, "80",
         ['bad.cu(2): error: identifier "y" is undefined', "SIZE=32"]),  # the others are shown
        ({"empty.cu": "// nothing\n"}, "80", ["empty.cu: no kernel in it for sm_80"]),
        ({}, "999", ["not checked: NVRTC ", " does not know sm_999", "nothing to check"]),
    ],
    ids=["spills", "does not compile", "no kernel", "unknown architecture"],
)  # fmt: skip
def test_faults_of_kernels_fail(check_kernels, tmp_path, capsys, files, arch, shown):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert check_kernels.main(["--arch", arch]) == 1
    out = capsys.readouterr().out
    assert all(text in out for text in shown), out


def test_wrong_or_missing_compiler_fails_with_advice(check_kernels, monkeypatch, capsys):
    def missing():
        raise RuntimeError("no libnvrtc.so")

    assert check_kernels.main(["--nvrtc", "1.0"]) == 1
    assert capsys.readouterr().out == f"NVRTC is {'.'.join(map(str, nvrtc.version()))}, expected 1.0\n"
    monkeypatch.setattr(nvrtc, "architectures", missing)
    assert check_kernels.main([]) == 1
    assert "NVRTC can't be loaded: pip install 'nemo-gpu-decoding[cuda" in capsys.readouterr().out


def test_generated_headers_are_written(tmp_path, capsys):
    assert load_script(SCRIPT).main(["--headers", str(tmp_path / "include")]) == 0
    written = {path.relative_to(tmp_path / "include").as_posix() for path in tmp_path.rglob("*.cuh")}
    assert {"fusion/automaton.cuh", "search/flexctc_beam/records.cuh", "graph/csr.cuh"} <= written
    assert "struct State {" in (tmp_path / "include/fusion/automaton.cuh").read_text()
    assert len(capsys.readouterr().out.splitlines()) == len(written)


# --------------------------------------------------------------------- Which torch `make setup` takes
NEWEST = "2.15.0, 2.13.0+cpu, 2.13.0, 2.9.1+cpu, 2.10.0+cpu, 2.14.0+cu130, 2.0.0+cpu"


@pytest.mark.parametrize(
    ("system", "gpu", "installed", "versions", "chosen", "advice"),
    [
        ("Linux", False, None, NEWEST, "torch==2.13.0+cpu", ""),  # even if CUDA builds are newer
        ("Linux", False, None, "2.15.0, 2.14.0", None, "make setup TORCH=torch "),
        ("Linux", False, None, "2.5.1+cpu, 2.15.0", None, "2.5.1+cpu, 2.15.0"),  # too old
        ("Linux", False, None, None, None, "no torch at all"),
        ("Darwin", False, None, None, "torch>=2.6", ""),
        ("Linux", True, None, None, "torch>=2.6", ""),
        ("Linux", True, "2.7.1+cu126", None, "torch==2.7.1+cu126", ""),
    ],
)
def test_chosen_torch_fits_the_machine(monkeypatch, capsys, system, gpu, installed, versions, chosen, advice):
    module = load_script(SCRIPT.with_name("choose_torch.py"))
    listed = f"torch (2.15.0)\nAvailable versions: {versions}\n" if versions else ""
    monkeypatch.setattr(module, "installed_torch", lambda: installed)
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(module.platform, "system", lambda: system)
    monkeypatch.setattr(module.subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 0, listed, ""))
    assert module.main() == (0 if chosen else 1)
    out, err = capsys.readouterr()
    assert (out, advice in err) == (f"{chosen}\n" if chosen else "", True)


# --------------------------------------------------------------------- counts of scripts/count_kernels.py
@pytest.fixture(scope="module")
def count_kernels():
    return load_script(SCRIPT.with_name("count_kernels.py"))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler() or "g++ is there")
def test_counts_of_the_page_are_those_of_the_kernels(count_kernels, request):
    page = count_kernels.PAGE.read_text(encoding="utf-8")
    written = re.search(r"<!-- counts: NVRTC ([\d.]+)", page)[1]
    if written != ".".join(map(str, nvrtc.version())):
        pytest.skip(f"the page was written with NVRTC {written}")
    case = "flexctc_beam, peaked, K = 16"
    runtime = EmulatedRuntime(by_nvrtc=True, order="ascending", cache=request.config.cache.mkdir("cuda_emulator"))
    rows = list(count_kernels.rows_of(count_kernels.decode(case, runtime)))
    table = re.search(r"<!-- counts.*?<!-- end -->", page, re.DOTALL)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    shown = [row for row in cells if row[0] == case]
    for found, expected in zip(count_kernels.kernel_lines(case, rows), shown[1:], strict=True):
        assert found[:5] == expected[:5]
        numbers, written = ([float(cell) for cell in cells[5:]] for cells in (found, expected))
        assert numbers == pytest.approx(written, rel=0.05), "count_kernels.py --write"


def test_estimated_time_is_that_of_the_slowest_block_and_the_bus(count_kernels):
    """264 blocks of two for each of 128 utterances: one per multiprocessor at once, so that they take two turns."""
    slowest, everything = Counts(1980, 0, 0, 0, 0, 0), Counts(0, 0, 0, 0, 3000, 1000)
    launched = Launched("kernel.cu", {}, "kernel", 2, 1024, 0, 99, slowest, everything)
    # half of each per block: (2 x 990 + 40 x 49.5) cycles
    assert count_kernels.estimated(launched, registers=64, shared=0) == pytest.approx(2 + 2 * 2.0)
    many = launched._replace(all=everything._replace(bytes_read=1_000_000))
    assert count_kernels.estimated(many, registers=64, shared=0) == pytest.approx(2 + 128 * 1_001_000 / 4.8e6)
