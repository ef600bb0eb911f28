"""The kernels as NVRTC compiles them, executed on the CPU: they find what the CPU finds, and faults are named.

The whole contract, and any other test of kernels, runs so with

    EMULATOR=nvrtc python -m pytest tests/search -k test_contract_cuda
"""

import itertools
from pathlib import Path

import pytest
import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine as flexctc
from nemo_gpu_decoding.search.transducer import records as transducer
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.cuda.marks import needs_nvrtc
from tests.cuda_emulator.build import link_ptx
from tests.cuda_emulator.emulator import EmulatedModule, EmulatedRuntime, EmulatorError
from tests.cuda_emulator.kernels import launch
from tests.cuda_emulator.ptx import UnknownPTXError, translate
from tests.random_models import random_log_probs
from tests.search.flexctc_beam import both as ctc
from tests.search.transducer import table_networks as tables
from tests.search.word_graph import both as word_graph
from tests.search.word_graph.models import random_graph

pytestmark = [pytest.mark.slow, needs_nvrtc]


@pytest.fixture(autouse=True)
def compiled_by_nvrtc(monkeypatch):
    monkeypatch.setenv("EMULATOR", "nvrtc")
    monkeypatch.setattr(flexctc, "THREADS", 64)
    monkeypatch.setattr(kernel_abi, "THREADS", 64)
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(transducer, name, 64)


# ----------------------------------------------------------------- to the bit what the CPU finds
CHECKED = pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])


@CHECKED
@pytest.mark.parametrize("merge", ["max", "prefix"])
def test_nvrtc_code_of_flexctc_beam_equals_the_cpu(emulated_runtime, merge):
    log_probs = random_log_probs(2, 8, 31, seed=1, sharpness=1.0)
    ctc.assert_equal(log_probs, [8, 5], fusion=ctc.random_fusion(30), merge=merge, beam_size=5, n_best=5)


@CHECKED
@pytest.mark.parametrize("strategy", list(tables.STRATEGIES))
def test_nvrtc_code_of_transducers_equals_the_cpu(emulated_runtime, strategy):
    make, config = tables.STRATEGIES[strategy]
    for pruning, durations in itertools.product(("late", "early"), ((), (0, 1, 2))):
        own = tables.TableNetworks(20, durations, seed=1, sharpness=1.0, blank_bias=0.0)
        options = config(beam_size=4, n_best=4, pruning_mode=pruning, alignments=True)
        frames, fusion = tables.random_frames(2, 4, seed=1), tables.random_fusion(20)
        tables.assert_equal(make, own, options, frames, [4, 2], fusion)


@CHECKED
def test_nvrtc_code_of_cuda_wfst_equals_the_cpu(emulated_runtime):
    graph = random_graph(1, columns=20, states=20)
    log_probs = random_log_probs(2, 5, 20, seed=1, sharpness=0.7)
    options = {"vocab_size": 19, "blank_id": 19, "max_active": 30, "beam": 6.0, "topology": "normal"}
    word_graph.assert_equal(graph, log_probs, [5, 3], **options)
    word_graph.assert_equal_lattices(graph, log_probs, [5, 3], n_best=3, **options)


@CHECKED
def test_nvrtc_code_of_paged_biglm_equals_the_cpu(emulated_runtime):
    graph, lms = word_graph.random_case(1)
    log_probs = random_log_probs(2, 5, word_graph.RANDOM_COLUMNS, seed=1, sharpness=0.7)
    word_graph.assert_equal_paged(graph, lms, log_probs, [5, 3], topology="normal", beam=8.0, chunk=3)


# ------------------------------------------------------------------------- what a GPU would stop at
SHARED = "extern __shared__ unsigned char smem[];"
# body of a kernel that gets `in` and `out`, pointers to 64 floats -> the message
FAULTS = {
    "float2 pair = *(const float2*)(in + threadIdx.x + 1); out[threadIdx.x] = pair.x + pair.y;":
        "misaligned access of 8 bytes",
    f"{SHARED} *(float4*)(smem + 8) = make_float4(0, 0, 0, 0);": "misaligned access of 16 bytes",
    f"{SHARED} out[0] = __ldcg((float*)smem);": "which is no address of global memory",
    "out[0] = float(__cvta_generic_to_shared(in));": "cvta.to.shared",
    "*(volatile float*)0 = 1;": "no address of global memory",
    f"{SHARED} ((volatile float*)smem)[64 + threadIdx.x] = 1;": r"4 bytes at \d+ of \d+ \+ 256 bytes",
    "static __shared__ float a[4]; ((volatile float*)a)[threadIdx.x + 500] = 1;": "out-of-bounds access of 4 bytes",
}  # fmt: skip
CHECKED_FAULTS = {
    "out[64 + threadIdx.x] = 1;": "out-of-bounds write of 4 bytes",
    "static __shared__ float a[64]; a[threadIdx.x] = in[threadIdx.x]; out[threadIdx.x] = a[63 - threadIdx.x];":
        r"(race on shared memory|nothing was written to).*kernels.cu:10\b",
    f"{SHARED} out[threadIdx.x] = ((volatile float*)smem)[threadIdx.x];": "nothing was written to",
}  # fmt: skip


CLEAN = "float2 pair = *(const float2*)(in + threadIdx.x / 2 * 2); out[threadIdx.x] = pair.x + pair.y;"
BODIES = [*FAULTS, *CHECKED_FAULTS, CLEAN]


@pytest.fixture(scope="module")
def kernels_cu(tmp_path_factory):
    file = tmp_path_factory.mktemp("ptx") / "kernels.cu"
    kernels = [
        f'extern "C" __global__ void kernel_{n}(const Args args) {{ auto [in, out] = args; {body} }}\n'
        for n, body in enumerate(BODIES)
    ]
    file.write_text("struct Args { const float* in; float* out; };\n" + "".join(kernels))
    return file


def run_cuda(runtime, file: Path, body: str) -> torch.Tensor:
    out, numbers = torch.zeros(64), torch.arange(64.0)
    launch(runtime, file, f"kernel_{BODIES.index(body)}", shared_bytes=256, **{"in": numbers, "out": out})
    return out


@pytest.mark.parametrize("body", FAULTS)
def test_fault_of_a_ptx_kernel_is_named(emulated_runtime, kernels_cu, body):
    with pytest.raises(EmulatorError, match=FAULTS[body]):
        run_cuda(emulated_runtime, kernels_cu, body)


@CHECKED
@pytest.mark.parametrize("body", CHECKED_FAULTS)
def test_race_checker_checks_ptx(emulated_runtime, kernels_cu, body):
    with pytest.raises(EmulatorError, match=CHECKED_FAULTS[body]):
        run_cuda(emulated_runtime, kernels_cu, body)


def test_clean_kernel_passes_the_checker(emulated_runtime, kernels_cu):
    assert run_cuda(emulated_runtime, kernels_cu, CLEAN).tolist() == [4.0 * (i // 2) + 1 for i in range(64)]


# ------------------------------------------------------------------ instructions that are refused
KERNEL = """
.visible .entry kernel_{n}(
	.param .align 8 .b8 kernel_{n}_param_0[8]
)
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	.reg .f32 %f<9>;
	.reg .f64 %fd<9>;
	ld.param.u64 %rd8, [kernel_{n}_param_0];
	mov.u32 %r8, %tid.x;
	mul.wide.u32 %rd7, %r8, 4;
	add.s64 %rd8, %rd8, %rd7;
	{body}
	st.global.u32 [%rd8], %r1;
	ret;
}}
"""


def module_of(*bodies: str) -> str:
    """PTX: a kernel for each of these instructions; it stores %r1 for each thread."""
    kernels = [KERNEL.format(n=n, body=body.replace("THIS", f"kernel_{n}")) for n, body in enumerate(bodies)]
    return ".version 9.5\n.target sm_90\n.address_size 64\n" + "".join(kernels)


def test_load_beyond_the_parameters_is_named(tmp_path):
    library = link_ptx(module_of("ld.param.u64 %rd1, [THIS_param_0+8]; cvt.u32.u64 %r1, %rd1;"), tmp_path, tmp_path)
    signature = Signature("kernel_0", {"out": Tensor(torch.int32, (32,), written=True)})
    module = EmulatedModule(EmulatedRuntime(), library, False)
    with pytest.raises(EmulatorError, match=r"ld\.param of 8 bytes at 8 of 8 bytes"):
        module.launch(signature, grid=1, block=32, out=torch.zeros(32, dtype=torch.int32))


@pytest.mark.parametrize("line", ["mul.hi.u32 %r1, %r8, 3;", "bar.sync 1;", "tex.1d.v4.f32.s32 {%f1}, [a, {%r1}];"])
def test_unknown_instruction_is_refused(line):
    with pytest.raises(UnknownPTXError, match=line.split()[0]):
        translate(module_of(line))
