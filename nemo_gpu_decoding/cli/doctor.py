"""`nemo-gpu-decoding doctor`: what this machine has, and the backend of each strategy on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nemo_gpu_decoding.report import format_table

EXAMPLES = ("", "json=true")


@dataclass
class DoctorOptions:
    """Options of `doctor`."""

    # Print JSON instead of tables, for scripts and bug reports.
    json: bool = False


OPTIONS = DoctorOptions


def run(options: DoctorOptions) -> int:
    """Print the facts; changes nothing, loads no model and does not import NeMo."""
    from nemo_gpu_decoding.cli.environment import examine, strategy_paths  # imports torch

    facts = examine()
    paths = strategy_paths()
    if options.json:
        answer = {"facts": list(map(asdict, facts)), "strategies": list(map(asdict, paths))}
        print(json.dumps(answer, indent=2))
        return 0
    print(format_table(["what", "found", "advice"], [list(vars(fact).values()) for fact in facts]))
    print()
    print(format_table(["strategy", "models", "path", "why"], [list(vars(p).values()) for p in paths]))
    return 0
