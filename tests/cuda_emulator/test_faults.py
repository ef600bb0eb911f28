"""Every kind of fault is found, whatever the schedule, and reported with the line where it is."""

import re

import pytest
import torch

from tests.cuda_emulator.emulator import EmulatorError
from tests.cuda_emulator.kernels import HERE, launch

pytestmark = pytest.mark.slow

THREADS = 64
LINES = (HERE / "faults.cu").read_text().splitlines()

# what the message says of each kernel that the checker alone can catch
UNORDERED = {
    "missing_barrier": "race on shared memory",
    "missing_barrier_after_reading": "race on shared memory",
    "missing_syncwarp": "race on shared memory",
    "shuffle_is_no_barrier": "race on shared memory|nothing was written to",
    "increment_is_not_atomic": "race on shared memory",
    "atomic_meets_plain_read": "race on shared memory",
    "bytes_beside_each_other_race": "race on shared memory",
    "race_in_global_memory": "race on global memory",
}
STRAY = {
    "reads_past_the_end": "out-of-bounds read of 4 bytes",
    "reads_before_the_start": "out-of-bounds read of 4 bytes",
    "writes_past_the_end": "out-of-bounds write of 4 bytes",
    "adds_past_the_end": "out-of-bounds atomic of 4 bytes",
    "follows_a_null_pointer": "out-of-bounds read of 4 bytes",
    "writes_past_shared_memory": "out-of-bounds write of 4 bytes: byte 256 of 256 of dynamic shared",
    "reads_past_shared_memory": "out-of-bounds read of 4 bytes: byte 256 of 256 of dynamic shared",
    "reads_what_nobody_wrote": "read of shared memory that nothing was written to",
}
# these fail without the checker too
SYNCHRONISATION = {
    "divergent_barriers": "divergent barriers",
    "barrier_for_some": "divergent barriers|deadlock",
    "lanes_missing_from_shuffle": "deadlock",
    "lane_not_in_mask": "a shuffle by lane 31, which is not in its mask 7fffffff",
    "shuffle_from_outside_the_mask": "shuffle reads lane 20, which is not in its mask 0000ffff",
    "lane_has_exited": "the mask ffffffff of a ballot names lanes that exited",
    "exits_while_others_wait": "thread exits while others wait for it in a warp intrinsic",
    "different_intrinsics_meet": "lanes of one warp wait for each other in different intrinsics",
    "looks_past_the_cache_at_shared_memory": "__ldcg of shared memory, which it cannot reach",
    "sets_a_condition_to_two_values": "condition 7 is set to [01] and to [01] in one launch",
}
SCHEDULES = [{"order": "ascending", "yield_percent": 0}, {"order": "descending"}, {"seed": 0}, {"seed": 1}]


def checked(options):
    return {"check": True, **options}


def run(runtime, kernel, grid=1):
    numbers = torch.arange(1, THREADS + 1, dtype=torch.int32)
    out = torch.zeros(THREADS, dtype=torch.int32)
    launch(
        runtime, "faults.cu", kernel, grid=grid, block=THREADS, shared_bytes=4 * THREADS,
        numbers=numbers, out=out,
    )  # fmt: skip
    return out


def lines_at_fault(kernel):
    """Numbers of the lines of a kernel that are marked as its fault."""
    start = next(i for i, line in enumerate(LINES) if f" {kernel}(" in line)
    end = next(i for i, line in enumerate(LINES) if i > start and line == "}")
    return [i + 1 for i in range(start, end) if "// fault" in LINES[i]]


def assert_found(runtime, kernel, message, grid=1):
    with pytest.raises(EmulatorError, match=message) as error:
        run(runtime, kernel, grid)
    assert kernel in str(error.value)
    marked = lines_at_fault(kernel)
    named = [int(line) for line in re.findall(r"faults\.cu:(\d+)", str(error.value))]
    assert not marked or set(named) & set(marked), str(error.value)


@pytest.mark.parametrize("emulated_runtime", map(checked, SCHEDULES), indirect=True, ids=str)
@pytest.mark.parametrize(("kernel", "message"), UNORDERED.items())
def test_races_are_found_under_any_schedule(emulated_runtime, kernel, message):
    assert_found(emulated_runtime, kernel, message)


@pytest.mark.parametrize("emulated_runtime", map(checked, SCHEDULES), indirect=True, ids=str)
def test_races_between_blocks_are_found(emulated_runtime):
    run(emulated_runtime, "race_between_blocks", grid=1)
    assert_found(emulated_runtime, "race_between_blocks", "race on global memory", grid=2)


@pytest.mark.parametrize("emulated_runtime", map(checked, SCHEDULES), indirect=True, ids=str)
@pytest.mark.parametrize(("kernel", "message"), STRAY.items())
def test_stray_accesses_are_found_before_they_happen(emulated_runtime, kernel, message):
    assert_found(emulated_runtime, kernel, message)


@pytest.mark.parametrize("emulated_runtime", [*SCHEDULES, *map(checked, SCHEDULES)], indirect=True, ids=str)
@pytest.mark.parametrize(("kernel", "message"), SYNCHRONISATION.items())
def test_faulty_synchronisation_is_found_with_and_without_the_checker(emulated_runtime, kernel, message):
    assert_found(emulated_runtime, kernel, message)


def test_a_missing_barrier_is_hidden_by_order_and_shown_by_random_schedules(emulated_runtime):
    numbers = torch.arange(1, THREADS + 1)
    right = numbers + torch.cat([torch.zeros(1, dtype=torch.int64), numbers[:-1]])
    emulated_runtime.order = "ascending"
    assert (run(emulated_runtime, "missing_barrier") == right).all()
    emulated_runtime.order = "random"
    assert all((run(emulated_runtime, "missing_barrier") != right).any() for _ in range(10))


@pytest.mark.parametrize("emulated_runtime", [{"seed": 0}, {"seed": 1}], indirect=True, ids=str)
def test_shared_memory_holds_garbage_at_first(emulated_runtime):
    out = run(emulated_runtime, "reads_what_nobody_wrote")
    assert out[1].item() == {0: -1, 1: 0xCDCDCDCD - 2**32}[emulated_runtime.seed]


@pytest.mark.parametrize("emulated_runtime", [{}, {"check": True}], indirect=True, ids=str)
def test_asynchronous_copies_arrive_when_waited_for(emulated_runtime):
    out = run(emulated_runtime, "reads_before_the_copy_arrives")
    assert (out == -1).all()  # what fresh shared memory holds


def test_a_launch_after_a_failed_one_is_not_affected(emulated_runtime):
    for kernel in ("lanes_missing_from_shuffle", "divergent_barriers"):
        assert_found(emulated_runtime, kernel, SYNCHRONISATION[kernel])
        emulated_runtime.order = "ascending"
        assert run(emulated_runtime, "missing_barrier").sum() == 64 * 65 - 64


def test_every_faulty_kernel_has_a_test():
    kernels = re.findall(r"__global__ void (\w+)\(", "\n".join(LINES))
    others = {"race_between_blocks", "reads_before_the_copy_arrives"}
    assert set(kernels) == {*UNORDERED, *STRAY, *SYNCHRONISATION, *others}
