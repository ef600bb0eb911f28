"""`nemo-gpu-decoding pack-lm`: converts a word LM of any size to the file that paged_biglm maps into memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from nemo_gpu_decoding.cli.decoding import existing_file, writable_file
from nemo_gpu_decoding.report import format_table

EXAMPLES = ("lm=large.arpa.gz out=large.packed", "lm=large.arpa.gz out=large.packed json=true")


@dataclass
class PackLMOptions:
    """Options of `pack-lm`."""

    # Word n-gram LM: ARPA, plain or gzipped, of any size, with its n-grams in any sequence.
    lm: str = MISSING
    # Output file. It is renamed into place when it is complete.
    out: str = MISSING
    # Folder for temporary files, about 30 bytes per n-gram. null: the folder of `out`. A fast disk is best, or memory
    # if there is enough (/dev/shm).
    temporary: str | None = None
    # Print the report as JSON instead of a table.
    json: bool = False


OPTIONS = PackLMOptions


def run(options: PackLMOptions) -> int:
    """Pack the LM and write it; print progress to stderr and the report to stdout."""
    from nemo_gpu_decoding.lm.pack import pack_arpa

    lm, out = existing_file("lm", options.lm), writable_file("out", options.out)
    temporary = options.temporary
    if temporary is not None and not Path(temporary).is_dir():
        raise ValueError(f"temporary={temporary}: there is no such folder")
    packed = pack_arpa(lm, out, temporary=temporary, progress=True)
    facts = {**asdict(packed), "ngrams": packed.num_ngrams}
    print(json.dumps(facts, indent=2) if options.json else report(facts))
    print(f"written to {out}", file=sys.stderr)
    return 0


def report(facts: Mapping[str, Any]) -> str:
    """The report as a table; `json=true` prints all facts by name."""
    orders = " + ".join(map(str, facts["counts"]))
    per_ngram, speed = facts["num_bytes"] / facts["ngrams"], facts["ngrams"] / facts["seconds"]
    bridged = "n-grams without their suffix (all but the first word): it gets its backed-off score"
    rows = [
        ("n-grams", f"{facts['ngrams']} = {orders}", ""),
        ("repaired", facts["repaired"], bridged if facts["repaired"] else ""),
        ("contexts", facts["states"], ""),
        ("size in MB", f"{facts['num_bytes'] / 1e6:.1f}", f"{per_ngram:.1f} bytes per n-gram"),
        ("seconds", f"{facts['seconds']:.1f}", f"{speed:.0f} n-grams per second"),
        ("peak memory in MB", f"{facts['peak_rss'] / 1e6:.0f}", "with mapped files"),
    ]
    return format_table(["what", "found", "remark"], rows)
