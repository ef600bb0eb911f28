"""The emulator as a `Runtime`: what it promises to decoders, and its messages for wrong launches."""

import pytest
import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor
from tests.cuda_emulator import build
from tests.cuda_emulator.build import CompileError
from tests.cuda_emulator.emulator import CPU, SHARED_BYTES_MAX
from tests.cuda_emulator.kernels import launch

COPY = """
#include "factor.h"
struct Args { const int* in; int* out; };
extern "C" __global__ void copy(const Args a) { a.out[threadIdx.x] = FACTOR * a.in[threadIdx.x]; }
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "factor.h").write_text("#define FACTOR 2\n")
    (tmp_path / "copy.cu").write_text(COPY)
    return tmp_path / "copy.cu"


def copied(emulated_runtime, source):
    numbers, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    launch(emulated_runtime, source, "copy", block=32, numbers=numbers, out=out)
    return out.tolist()


def test_emulator_refuses_other_devices(emulated_runtime, source):
    assert emulated_runtime.why_not(CPU) is None
    assert "not on cuda:0" in emulated_runtime.why_not(torch.device("cuda:0"))
    assert emulated_runtime.device_for(CPU) == CPU
    assert emulated_runtime.shared_bytes(CPU) == 227 * 1024
    with pytest.raises(ValueError, match="device: is cuda:0, expected cpu"):
        emulated_runtime.load(str(source), torch.device("cuda:0"))


def test_a_changed_header_is_compiled_again_and_a_known_one_is_not(emulated_runtime, source, monkeypatch):
    assert copied(emulated_runtime, source)[1] == 2
    monkeypatch.setattr(build, "_link", None)  # compiling again would fail
    assert copied(emulated_runtime, source)[1] == 2
    monkeypatch.undo()
    (source.parent / "factor.h").write_text("#define FACTOR 3\n")
    assert copied(emulated_runtime, source)[1] == 3


def test_a_compile_error_shows_file_and_line(emulated_runtime, source):
    source.write_text(COPY.replace("FACTOR *", "unknown *"))
    with pytest.raises(CompileError, match=r"copy\.cu:4:\d+: error: 'unknown' was not declared|copy\.cu:4:"):
        copied(emulated_runtime, source)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"grid": 0, "block": 32}, "grid is 0, expected at least 1"),
    ({"grid": 1, "block": 33}, "block is 33, expected a multiple of 32 up to 1024"),
    ({"grid": 1, "block": 0}, "block is 0, expected a multiple of 32 up to 1024"),
    ({"grid": 1, "block": 1056}, "block is 1056, expected a multiple of 32 up to 1024"),
    ({"grid": 1, "block": 32, "shared_bytes": SHARED_BYTES_MAX + 1}, "shared_bytes is 232449, expected at most"),
])  # fmt: skip
def test_wrong_sizes_are_refused(emulated_runtime, source, sizes, message):
    numbers = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"kernel copy: {message}"):
        launch(emulated_runtime, source, "copy", **sizes, numbers=numbers, out=numbers.clone())


def test_arguments_are_checked_as_for_a_gpu(emulated_runtime, source):
    module = emulated_runtime.load(str(source), CPU)
    ints = Tensor(torch.int32, ("N",))
    numbers = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kernel copy, argument out: has dtype torch\.float32"):
        module.launch(
            Signature("copy", {"numbers": ints, "out": ints}), grid=1, block=32, numbers=numbers, out=torch.zeros(32),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"kernel copy: the signature's struct takes 8 bytes, .* \[16\]"):
        module.launch(Signature("copy", {"numbers": ints}), grid=1, block=32, numbers=numbers)
    with pytest.raises(ValueError, match="kernel paste: not in its source file, which has copy"):
        module.launch(Signature("paste", {"numbers": ints}), grid=1, block=32, numbers=numbers)


def test_the_same_seed_gives_the_same_schedule(emulated_runtime):
    def outcome(seed):
        emulated_runtime.seed, emulated_runtime.launches = seed, 0
        out = torch.zeros(64, dtype=torch.int32)
        launch(emulated_runtime, "faults.cu", "missing_barrier", numbers=torch.arange(64, dtype=torch.int32), out=out)
        return tuple(out.tolist())

    assert [outcome(seed) for seed in range(5)] == [outcome(seed) for seed in range(5)]
    assert len({outcome(seed) for seed in range(5)}) == 5
