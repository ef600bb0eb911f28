"""What the system and control groups say about free memory, out of files that look like theirs."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.cuda.host_memory import free_host_bytes, lock_limit


@pytest.fixture
def machine(tmp_path):
    """A machine with 1 MiB free and no control groups."""
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\nMemFree: 5 kB\nMemAvailable:    1024 kB\n")
    return tmp_path


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
    text = f"anon 7\ninactive_file {files}\nactive_file 1\n"
    write(root, f"sys/fs/cgroup/{folder}/memory.stat", text)


def test_without_control_groups_it_is_the_systems(machine):
    assert free_host_bytes(machine) == 1 << 20


def test_pages_of_files_count_as_free(machine):
    write(machine, "proc/self/cgroup", "0::/job\n")
    group(machine, "job", 1000, 900, files=50)
    assert free_host_bytes(machine) == 1000 - 900 + 50 + 1


def test_the_tightest_of_all_groups_above_counts(machine):
    write(machine, "proc/self/cgroup", "0::/slice/job/step\n")
    group(machine, "slice/job/step", "max", 10)
    group(machine, "slice/job", 5000, 100)
    group(machine, "slice", 3000, 200)
    assert free_host_bytes(machine) == 3000 - 200 + 1


def test_a_container_sees_its_group_as_the_top(machine):
    write(machine, "proc/self/cgroup", "0::/\n")
    group(machine, ".", 700, 800)
    assert free_host_bytes(machine) == 0


def test_control_groups_of_version_1(machine):
    write(machine, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    group(machine, "memory/job", 2000, 500, version=1)
    group(machine, "memory", 9223372036854771712, 500, version=1)
    assert free_host_bytes(machine) == 1501


def test_a_system_that_tells_nothing(tmp_path):
    assert free_host_bytes(tmp_path) is None


def test_this_machine():
    assert free_host_bytes() is None or free_host_bytes() > 0
    assert lock_limit() is None or lock_limit() >= 0
