"""The cache of compiled kernels, and the compiler behind it."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_gpu_decoding.cuda import compile as compiling
from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import Architecture, architecture, compiler_options, kernel_code, read_source
from nemo_gpu_decoding.cuda.nvrtc import Compiled, CompileError
from tests.cuda.marks import needs_nvrtc

KERNEL = """
#include "cuda/scale.cuh"
extern "C" __global__ void axpy(float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * scale() + a;
}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one kernel, and an empty cache."""
    root = tmp_path / "package"
    (root / "cuda").mkdir(parents=True)
    (root / "kernel.cu").write_text(KERNEL)
    (root / "cuda" / "scale.cuh").write_text("inline float scale() { return 2.0f; }\n")
    monkeypatch.setattr(compiling, "read_source", lambda name: read_source(name, root))
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path / "cache")
    return root


@pytest.fixture
def compiled(monkeypatch):
    """A compiler of another version that takes no time; the options of all its runs."""
    runs = []

    def fake(name, text, headers, options):
        runs.append(options)
        return Compiled(f"code {len(runs)}".encode(), "a warning")

    monkeypatch.setattr(nvrtc, "compile_program", fake)
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    return runs


def entries(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "cubin").iterdir())


def test_second_compilation_comes_from_the_cache(package, compiled):
    assert kernel_code("kernel.cu", Architecture(90)) == kernel_code("kernel.cu", Architecture(90)) == b"code 1"
    assert len(compiled) == 1
    (entry,) = entries(package)
    assert entry.name.startswith("kernel-sm_90-")


def test_source_header_macro_and_version_make_another_entry(package, compiled, monkeypatch):
    kernel_code("kernel.cu", Architecture(90))
    kernel_code("kernel.cu", Architecture(80))
    kernel_code("kernel.cu", Architecture(90), {"WIDTH": 4})
    kernel_code("kernel.cu", Architecture(90), {"WIDTH": 8})
    (package / "cuda" / "scale.cuh").write_text("inline float scale() { return 3.0f; }\n")
    kernel_code("kernel.cu", Architecture(90))
    (package / "kernel.cu").write_text(KERNEL + "// changed\n")
    kernel_code("kernel.cu", Architecture(90))
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 1))
    kernel_code("kernel.cu", Architecture(90))
    assert len(compiled) == len(entries(package)) == 7


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:33] + b"?" + b[34:], lambda _: b""])
def test_damaged_cache_entry_is_replaced(damage, package, compiled, caplog):
    kernel_code("kernel.cu", Architecture(90))
    (entry,) = entries(package)
    entry.write_bytes(damage(entry.read_bytes()))
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        assert kernel_code("kernel.cu", Architecture(90)) == b"code 2"
    assert "is damaged, compiling the kernel anew" in caplog.text
    assert kernel_code("kernel.cu", Architecture(90)) == b"code 2"
    assert entries(package) == [entry]


def test_cache_that_cannot_be_written_does_not_stop_the_work(package, compiled, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        assert kernel_code("kernel.cu", Architecture(90)) == b"code 1"
    assert entries(package) == []
    (package.parent / "cache" / "cubin").rmdir()
    (package.parent / "cache" / "cubin").write_text("a file where the folder should be")
    assert kernel_code("kernel.cu", Architecture(90)) == b"code 2"
    assert caplog.text.count("can't keep a compiled kernel") == 2


def test_options_forbid_contraction_and_carry_macros():
    options = compiler_options(Architecture(90), {"B": 2, "A": "float"})
    assert options[0] == "--gpu-architecture=sm_90"
    assert "--fmad=false" in options
    assert options[-2:] == ["--define-macro=A=float", "--define-macro=B=2"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), Architecture(90)),
        ((8, 6), Architecture(86)),
        ((8, 7), Architecture(86)),
        ((10, 3), Architecture(100)),
        ((7, 0), None),
        ((13, 0), Architecture(100, ptx=True)),
    ],
)
def test_new_gpu_gets_the_code_of_an_older_one_or_ptx(capability, expected, monkeypatch):
    monkeypatch.setattr(nvrtc, "architectures", lambda: (75, 80, 86, 90, 100))
    assert architecture(capability) == expected


@needs_nvrtc
def test_nvrtc_compiles_ptx_cubins_and_macros(package):
    code = kernel_code("kernel.cu", Architecture(90, ptx=True))
    assert b".target sm_90" in code
    assert b".entry axpy" in code
    (entry,) = entries(package)
    assert entry.name.startswith("kernel-compute_90-")
    code = kernel_code("kernel.cu", Architecture(90))
    assert code[:4] == b"\x7fELF"
    assert b"axpy" in code
    assert kernel_code("kernel.cu", Architecture(90)) == code
    (package / "kernel.cu").write_text('extern "C" __global__ void NAME(TYPE* x) { x[0] = 1; }')
    code = kernel_code("kernel.cu", Architecture(90), {"NAME": "renamed", "TYPE": "double"})
    assert b"renamed" in code


@needs_nvrtc
def test_compile_error_names_file_and_line(package):
    (package / "kernel.cu").write_text(KERNEL.replace("+ a", "+ b"))
    with pytest.raises(CompileError, match=r'kernel.cu\(5\): error: identifier "b" is undefined'):
        kernel_code("kernel.cu", Architecture(90))
    (package / "kernel.cu").write_text(KERNEL)
    (package / "cuda" / "scale.cuh").write_text("\n\ninline float scale() { return y; }\n")
    with pytest.raises(CompileError, match=r'cuda/scale.cuh\(3\): error: identifier "y" is undefined'):
        kernel_code("kernel.cu", Architecture(90))
    assert not (package.parent / "cache").exists()


@needs_nvrtc
def test_unknown_compiler_option_is_an_error(package):
    with pytest.raises(CompileError, match="does not compile with"):
        nvrtc.compile_program("k.cu", "", {}, ["--gpu-architecture=sm_90", "--no-such-option"])


@needs_nvrtc
def test_threads_compile_at_once_into_one_entry(package):
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: kernel_code("kernel.cu", Architecture(90)), range(4)))
    assert len(set(codes)) == 1
    assert len(entries(package)) == 1


def test_warnings_of_the_compiler_are_logged(package, compiled, caplog):
    with caplog.at_level(logging.DEBUG, "nemo_gpu_decoding"):
        kernel_code("kernel.cu", Architecture(90))
    assert "a warning" in caplog.text


# --------------------------------------------------------------------- Kernel files and their headers
def test_headers_of_headers_are_read_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cu").write_text('#include "b.cuh"\n  #  include "a/c.cuh"\nint x;\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a/c.cuh"\n')
    (tmp_path / "a" / "c.cuh").write_text('#include "b.cuh"\n// #include "not/there.cuh"\n')
    source = read_source("a/kernel.cu", tmp_path)
    assert source.name == "a/kernel.cu"
    assert source.text.endswith("int x;\n")
    assert set(source.headers) == {"b.cuh", "a/c.cuh"}


def test_missing_header_names_the_file_that_includes_it(tmp_path):
    (tmp_path / "kernel.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"gone.cuh \(included by b.cuh\)"):
        read_source("kernel.cu", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"kernel source other.cu is not in"):
        read_source("other.cu", tmp_path)
