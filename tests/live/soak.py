"""Very many short utterances through few slots: what they give, and what memory that takes.

    python -m tests.live.soak                                   100,000 through 64, three strategies, some minutes
    python -m tests.live.soak utterances=1000000 cuda_wfst

Utterances of random lengths come and go, two of three hear a chunk in each step. A sample of them is decoded alone,
too. Sizes are those of all arrays that the slots refer to, and of the process. `test_slots.py` runs a short version.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.live.slots import LiveSlot, Slots
from tests.contract.checks import bytes_of
from tests.contract.subject import Subject, facts
from tests.contract.subjects import TABLE

SUBJECTS = {name: kind for name, kind, _ in TABLE}
STRATEGIES = ("flexctc_beam", "cuda_wfst", "alsd_pp")
MOST_FRAMES, CHUNK = 8, 3
RECORDINGS = 500  # that utterances are taken from
STATUS = Path("/proc/self/status")


class Report(NamedTuple):
    utterances: int
    compared: int  # with the same utterance decoded alone
    different: int
    array_bytes: int  # of all arrays of the slots, at the most since the report before
    resident_bytes: int  # of the process


def soak(
    subject: Subject, utterances: int, slots: int = 64, *, reports: int = 10, every: int = 50, seed: int = 0
) -> Iterator[Report]:
    """Decode utterances; a report after each `1 / reports` of them. One of `every` is decoded alone as well."""
    rng, decoder = np.random.default_rng(seed), subject.fused(subject.variants[0])
    recordings = subject.random_inputs(RECORDINGS, MOST_FRAMES, seed=seed)
    requests = [None, None, subject.request()]
    live = Slots(decoder, slots)
    running: dict[LiveSlot, list[int]] = {}  # number, recording, frames in all, frames read
    begun = ended = compared = different = most = 0
    while ended < utterances:
        while len(running) < slots and begun < utterances:
            recording, frames = rng.integers(RECORDINGS), rng.integers(1, MOST_FRAMES + 1)
            running[live.begin(requests[begun % 3])] = [begun, int(recording), int(frames), 0]
            begun += 1
        chunks: dict[LiveSlot, torch.Tensor] = {}
        for slot, own in running.items():
            if rng.random() < 2 / 3:
                chunks[slot] = recordings[own[1], own[3] : min(own[2], own[3] + CHUNK)]
                own[3] += len(chunks[slot])
        assert live.push(chunks) == {}
        live.partial(list(chunks))
        over = [slot for slot, own in running.items() if own[2] == own[3]]
        most = max(most, bytes_of(live))
        for slot, result in zip(over, live.end(over), strict=True):
            number, recording, frames, _ = running.pop(slot)
            ended += 1
            if number % every == 0:
                (alone,) = decoder.decode(recordings[[recording], :frames], [frames], [requests[number % 3]])
                compared += 1
                different += facts(alone) != facts(result)
            if ended % (utterances // reports) == 0:
                yield Report(ended, compared, different, most, _resident())
                most = 0
    assert len(live) == 0


def _resident() -> int:
    if not STATUS.exists():
        return 0
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main(arguments: list[str]) -> int:
    options: dict[str, Any] = dict(argument.split("=") for argument in arguments if "=" in argument)
    utterances, slots = int(options.get("utterances", 100_000)), int(options.get("slots", 64))
    different = 0
    for name in [argument for argument in arguments if "=" not in argument] or STRATEGIES:
        began = time.process_time()
        for report in soak(SUBJECTS[name]("cpu"), utterances, slots, every=100):
            print(
                f"{name}, {report.utterances} utterances: {report.array_bytes:,} bytes of arrays, process "
                f"{report.resident_bytes / 1e6:.1f} MB, {report.different} of {report.compared} unlike alone, "
                f"{time.process_time() - began:.0f} CPU s",
                flush=True,
            )
        different += report.different
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
