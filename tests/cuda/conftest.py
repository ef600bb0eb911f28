"""torch as it looks on a machine with two GPUs, and a compiler that takes no time."""

from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cuda import driver, nvrtc


@pytest.fixture
def gpus(monkeypatch):
    """torch sees two H100s and NVRTC 13.1 is there; `current` is what torch has selected."""
    state = SimpleNamespace(current=0, capability=(9, 0), streams={0: 0, 1: 0x5EED})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: state.capability)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.streams[device.index])
    )
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    monkeypatch.setattr(nvrtc, "architectures", lambda: (75, 80, 86, 90, 100, 120))
    return state


@pytest.fixture
def compiled(monkeypatch):
    """What has been compiled: (source, arch, macros); the code is a fake."""
    calls = []

    def fake_code(source, arch, defines=None):
        calls.append((source, arch, dict(defines or {})))
        return b"PTX" if arch.ptx else b"machine code"

    monkeypatch.setattr(driver, "kernel_code", fake_code)
    return calls
