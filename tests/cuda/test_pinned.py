"""Tables in host memory: their bytes, and when they are pinned."""

import gc
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cuda import host_memory as pinned
from nemo_gpu_decoding.cuda.host_memory import HostTable, PinningError, free_host_bytes

GPU = torch.device("cuda", 1)


def filled_table():
    table = HostTable(256 * 40)
    table.bytes[:] = torch.arange(256, dtype=torch.uint8).repeat(40)
    return table


@pytest.fixture
def cudart(monkeypatch):
    """CUDA's runtime, as far as pinning goes; `pinned` maps addresses to sizes."""
    state = SimpleNamespace(pinned={}, flags=[], status=0, current=[0])
    monkeypatch.setattr(pinned, "device_attribute", lambda name, index: int(index == 1))

    @contextmanager
    def on_device(device):
        state.current.append(device.index)
        yield
        state.current.pop()

    monkeypatch.setattr(torch.cuda, "device", on_device)

    def register(address, size, flags):
        assert address not in state.pinned
        assert state.current[-1] == GPU.index
        if state.status == 0:
            state.pinned[address] = size
            state.flags.append(flags)
        return state.status

    def unregister(address):
        del state.pinned[address]  # a KeyError if that is done twice

    library = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    return state


def test_table_of_no_bytes_is_not_pinned_and_too_many_are_refused(cudart):
    assert HostTable(0).pin(GPU).bytes.shape == (0,)
    assert not cudart.pinned
    with pytest.raises(ValueError, match="nbytes is -1"):
        HostTable(-1)
    with pytest.raises(PinningError, match=r"can't get 2147483648.00 GiB of host memory .* are free"):
        HostTable(1 << 61)


def test_table_is_pinned_once_in_its_size_for_all_devices(cudart):
    table = filled_table().pin(GPU)
    assert table.pin(GPU) is table
    assert cudart.pinned == {table.bytes.data_ptr(): 10240}
    assert cudart.flags == [1 | 2]


def test_table_stays_pinned_as_long_as_a_tensor_of_it_lives(cudart):
    table = filled_table().pin(GPU)
    numbers = table.bytes.view(torch.int32)[5:]
    del table
    gc.collect()
    assert cudart.pinned
    assert int(numbers[0]) == 0x17161514
    del numbers
    gc.collect()
    assert not cudart.pinned


def test_refused_pinning_is_an_error(cudart):
    cudart.status = 2
    with pytest.raises(RuntimeError, match=r"cudaHostRegister can't pin 0.00 GiB of host memory: 2"):
        filled_table().pin(GPU)
    table = filled_table()
    with pytest.raises(RuntimeError):
        table.pin(GPU)
    assert not cudart.pinned


def test_device_that_cannot_use_host_addresses_is_refused(cudart):
    """On Windows, for example: a kernel would read from an address that means nothing there."""
    with pytest.raises(PinningError, match="kernels on cuda:0 can't read host memory at the host's address"):
        filled_table().pin(torch.device("cuda", 0))
    assert not cudart.pinned
    table = filled_table().pin(GPU)
    with pytest.raises(PinningError, match="cuda:0"):
        table.pin(torch.device("cuda", 0))


def mapping_of(table):
    """What Linux knows of the memory of a table: its line of permissions, and its flags."""
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    ranges = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+)")
    address = table.bytes.data_ptr()
    for i, line in enumerate(smaps):
        found = ranges.match(line)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            return found[3], next(line for line in smaps[i:] if line.startswith("VmFlags:")).split()[1:]
    raise AssertionError("not in /proc/self/smaps")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no Linux with huge pages")
def test_memory_is_private_with_huge_pages_and_not_copied_by_forks(cudart):
    """Private, as shared memory hardly ever gets huge pages; no fork copies it while it is pinned."""
    table = HostTable(5 << 20)
    permissions, flags = mapping_of(table)
    assert permissions == "rw-p"
    assert "hg" in flags
    assert "dc" not in flags
    table.pin(GPU)
    assert "dc" in mapping_of(table)[1]


# ------- What the system and control groups say about free memory, out of files that look like theirs
def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(root, folder, limit, usage, files=0, version=2):
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(root, f"sys/fs/cgroup/{folder}/{names[0]}", f"{limit}\n")
    write(root, f"sys/fs/cgroup/{folder}/{names[1]}", f"{usage}\n")
    write(root, f"sys/fs/cgroup/{folder}/memory.stat", f"anon 7\ninactive_file {files}\nactive_file 1\n")


def test_free_memory_is_the_least_of_system_and_control_groups(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\nMemFree: 5 kB\nMemAvailable:    1024 kB\n")
    assert free_host_bytes(tmp_path) == 1 << 20
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    group(tmp_path, "job", 1000, 900, files=50)
    assert free_host_bytes(tmp_path) == 1000 - 900 + 50 + 1
    write(tmp_path, "proc/self/cgroup", "0::/slice/job/step\n")
    group(tmp_path, "slice/job/step", "max", 10)
    group(tmp_path, "slice/job", 5000, 100)
    group(tmp_path, "slice", 3000, 200)
    assert free_host_bytes(tmp_path) == 3000 - 200 + 1
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    group(tmp_path, "memory/job", 2000, 500, version=1)
    group(tmp_path, "memory", 9223372036854771712, 500, version=1)
    assert free_host_bytes(tmp_path) == 1501
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    group(tmp_path, ".", 700, 800)
    assert free_host_bytes(tmp_path) == 0


def test_free_memory_is_none_where_the_system_does_not_say(tmp_path):
    assert free_host_bytes(tmp_path) is None
    assert free_host_bytes() is None or free_host_bytes() > 0
