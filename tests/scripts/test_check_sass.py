"""The script that reads machine code: what it counts, and what it refuses."""

import re

import pytest

from nemo_gpu_decoding.cuda.compile import kernel_files, read_source
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine as flexctc_engine
from scripts import check_sass
from tests.cuda.marks import needs_nvrtc

LISTING = """	.section	.nv.info,"",@"SHT_CUDA_INFO"
	//----- nvinfo : EIATTR_REGCOUNT
	.align		4
        /*0000*/ 	.byte	0x04, 0x2f
        /*0002*/ 	.short	(.L_18 - .L_17)
	.align		4
.L_17:
        /*0004*/ 	.word	index@(expand)
        /*0008*/ 	.word	0x0000004a
	.section	.text.expand,"ax",@progbits
        .global         expand
        .type           expand,@function
expand:
.text.expand:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR8][R10.64] ;
        /*0020*/              @P1  LDG.E R20, desc[UR8][R10.64] ;
        /*0030*/                   LD.E.64 R16, desc[UR8][R10.64+0x8] ;
        /*0040*/                   LD.E.STRONG.SYS R16, desc[UR8][R10.64+0x8] ;
        /*0050*/                   DFMA R8, R10, R12, R14 ;
        /*0060*/                   STL [R1], R2 ;
        /*0070*/                   CALL.ABS.NOINC R2 ;
        /*0080*/                   NOP ;
	.type		lost,@function
	.type		cudaGraphSetConditional,@function
"""
LOCAL = """
extern "C" __global__ void __launch_bounds__(256) uses(float* x, int n) {
  float kept[16];
  for (int i = 0; i < n; ++i) kept[(i * n) & 15] = x[i];
  x[n] = kept[n & 15] + kept[(n * 7) & 15];
}
"""
GOOD = """
extern "C" __global__ void __launch_bounds__(256) good(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
"""


def test_instructions_of_a_listing_are_counted():
    (kernel,) = check_sass.counted(LISTING)
    assert (kernel.name, kernel.registers) == ("expand", 74)
    assert (kernel.instructions, kernel.doubles, kernel.strong, kernel.local, kernel.generic) == (8, 1, 1, 1, 2)
    assert dict(kernel.widths) == {128: 1, 32: 2, 64: 1}
    assert check_sass.unknown_functions(LISTING) == {"lost"}


def test_threads_of_every_kernel_are_those_of_its_launch(monkeypatch):
    """Of every kernel. `expand` of aes_pp has fewer, so that 512 blocks are one wave of an H100."""
    monkeypatch.setattr(flexctc_engine, "THREADS", 288)
    found = {
        (name, kernel): check_sass.threads_of(name, kernel, 90)
        for name in kernel_files()
        for text in (read_source(name).text, *read_source(name).headers.values())
        for kernel in re.findall(r"__global__ void .*?(\w+)\(const", text)
    }
    assert len(found) == 15
    assert found["search/flexctc_beam/kernel.cu", "advance"] == 288
    assert found["search/flexctc_beam/finish.cu", "finish"] == 128
    assert found["search/word_graph/kernel.cu", "advance"] == 512
    assert found["search/transducer/alsd.cu", "expand"] == 256
    assert found["search/transducer/aes.cu", "expand"] == 128
    with pytest.raises(ValueError, match="lost of search/transducer/aes"):
        check_sass.threads_of("search/transducer/aes.cu", "lost", 90)


@needs_nvrtc
def test_kernel_with_local_memory_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "good.cu").write_text(GOOD)
    monkeypatch.setattr(check_sass, "read_source", lambda name: read_source(name, tmp_path))
    monkeypatch.setattr(check_sass, "variants", lambda name, arch: [{}])
    monkeypatch.setattr(check_sass, "threads_of", lambda name, kernel, arch: 256)
    assert check_sass.main(["good.cu", "--arch", "80"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("no local memory, no unknown function\n")
    assert "0/0/1" in out
    (tmp_path / "local.cu").write_text(LOCAL)
    assert check_sass.main(["good.cu", "local.cu", "--arch", "80"]) == 1
    assert "local.cu : uses on sm_80 has" in capsys.readouterr().out


def test_missing_disassembler_is_named(monkeypatch, capsys):
    monkeypatch.setattr(check_sass, "nvdisasm", lambda: None)
    assert check_sass.main([]) == 1
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out
