"""The rows of a result: what they hold before anything was measured, and how they are told."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from nemo_gpu_decoding.bench.cases import Case
from nemo_gpu_decoding.bench.peers.base import Peer, Setting
from nemo_gpu_decoding.bench.task import Utterances

Row = dict[str, Any]


def empty_row(case: Case, peer: Peer, ours: Peer) -> Row:
    """Names and settings; nothing is measured, nothing verified."""
    nothing = {"ours": None, "peer": None}
    return {
        "strategy": ours.name,
        "peer": peer.name,
        "params": case.ours.as_params(),
        "peer_params": _used(case.theirs, peer).as_params(),
        "verified": False,
        "verified_by": None,
        "seconds": nothing,
        "ratio": None,
        "target": case.target,
        "met": None,
        "repetitions": 0,
        "timing": nothing,
        "rtfx": nothing,
        "wer": nothing,
        "ter": nothing,
        "skipped": None,
    }


def _used(setting: Setting, peer: Peer) -> Setting:
    """The setting with the threads that the peer really uses."""
    if peer.multithreaded:
        return setting
    return replace(setting, threads=1)


def missing_input(case: Case, task: Utterances) -> str | None:
    """Why a case can't be measured on this task, None if it can."""
    if case.impossible:
        return case.impossible
    missing = [name for name in case.needs if not getattr(task, name)]
    return f"no {', '.join(name + '=' for name in missing)} given" if missing else None


def report_progress(row: Row) -> None:
    """One line on stderr per row: a full run takes minutes."""
    result = row["skipped"] or f"{row['ratio']:.1f}x, verified: {row['verified']} ({row['verified_by']})"
    where = f"{row['part']}, B={row['batch']}, " if "part" in row else ""
    where += f"{row['networks']}, " if "networks" in row else ""
    print(f"{where}{row['peer']} {row['peer_params']}: {result}", file=sys.stderr, flush=True)
