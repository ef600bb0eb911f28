"""cuda-python before a pretended driver: sizes, addresses and handles could get lost between Python and C."""

import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).with_name("fake_libcuda.c")
COMPILER = shutil.which("gcc") or shutil.which("g++")

pytestmark = [
    pytest.mark.slow,  # each test is a process of its own
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is there: see tests/gpu"),
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-python"),
]

# the library's name makes the loader take it when cuda-python asks for libcuda.so.1
PRELUDE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from types import SimpleNamespace
import numpy as np, torch
torch.version.cuda = "12.8"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=4096 + device.index)
from nemo_gpu_decoding.cuda import driver, nvrtc
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, runtime
nvrtc.version = lambda: (12, 9)
nvrtc.architectures = lambda: (90,)
driver.kernel_code = lambda *_: b"machine code\\0"
device = torch.device("cuda", 1)
AXPY = Signature("axpy", {
    "x": Tensor(torch.float32, ("N",), optional=True),
    "a": Scalar(np.float32), "n": Scalar(np.int32), "last": Scalar(np.bool_),
})
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = [COMPILER, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-w"]
    subprocess.run([*command, "-o", path, SOURCE], check=True)
    return path


def output_of(program, library):
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, library], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return sorted(line for line in run.stdout.splitlines())


def test_launch_arrives_in_the_driver_with_sizes_and_arguments(library):
    lines = output_of(
        "assert runtime().why_not(device) is None, runtime().why_not(device)\n"
        "assert runtime().shared_bytes(device) == 101376\n"
        "module = runtime().load('a/kernel.cu', device)\n"
        "module.launch(AXPY, grid=5, block=96, shared_bytes=60000, x=None, a=0.1, n=-2, last=True)\n"
        "module.launch(AXPY, grid=6, block=32, x=None, a=0.1, n=-2, last=True)\n",
        library,
    )
    arguments = struct.pack("<Qfi?7x", 0, 0.1, -2, True).hex()
    for sizes in ("5 1 1 block 96 1 1 shared 60000", "6 1 1 block 32 1 1 shared 0"):
        assert f"launch 9 grid {sizes} stream 4097 extra 0: {arguments}" in lines
    assert "image machine code" in lines
    assert "set attribute 8 of 9 to 101360" in lines
    assert "device attribute 97 of 41" in lines
    assert lines.count("push 82") == lines.count("pop") == 4
    # a capture forbids loading; a later launch loads nothing
    assert lines.count("capture mode 2") == lines.count("capture mode 0") == 2
    assert lines.count("function axpy of 7") == 1


def test_failure_has_the_name_that_the_driver_gives(library):
    output_of(
        "module = runtime().load('a/kernel.cu', device)\n"
        "try:\n"
        "    module.launch(AXPY, grid=666, block=96, x=None, a=0.1, n=1, last=False)\n"
        "except RuntimeError as error:\n"
        "    text = str(error)\n"
        "assert 'axpy' in text and '666 blocks of 96' in text, text\n"
        "assert 'cuLaunchKernel fails with CUDA_ERROR_OF_THE_FAKE (as ordered)' in text, text\n"
        "try:\n"
        "    module.find(Signature('gone', AXPY.parameters))\n"
        "except RuntimeError as error:\n"
        "    text = str(error)\n"
        "assert 'kernel gone is not in a/kernel.cu: cuModuleGetFunction fails with' in text, text\n",
        library,
    )


def test_while_node_arrives_in_the_driver(library):
    """Handles, sizes and the graph of the body pass through cuda-python's own structures."""
    lines = output_of(
        "from contextlib import nullcontext\n"
        "from nemo_gpu_decoding.cuda.while_graph import capture_while, why_no_while_graphs\n"
        "torch.cuda.empty_cache = torch.cuda.MemPool = lambda: None\n"
        "torch.cuda.device = torch.cuda.stream = torch.cuda.use_mem_pool = lambda *_: nullcontext()\n"
        "torch.cuda.ExternalStream = lambda number, device: SimpleNamespace(\n"
        "    cuda_stream=number, device=torch.device('cuda', device))\n"
        "assert why_no_while_graphs(device) is None, why_no_while_graphs(device)\n"
        "capture_while(device, lambda handle: print(f'body {handle:x}', flush=True)).replay()\n",
        library,
    )
    assert [line for line in lines if line not in ("push 82", "pop")] == sorted([
        "condition in 256 of 82: 1 flags 1",
        "node in 256 after 0: type 13 handle abcdef0123456789 kind 1 size 1 context 82",
        "stream with flags 1",
        "begin 1025 in 768 after 0 mode 1",
        "body abcdef0123456789",
        "end 1025",
        "instantiate 256 flags 0",
        "destroy 256",
        "launch 1280 on 4097",
        "destroy executable 1280",
    ])  # fmt: skip
