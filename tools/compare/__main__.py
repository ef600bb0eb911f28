"""The command line of `python -m tools.compare`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_gpu_decoding.cli.main import guarded, run_program
from tools.compare import compare

PROGRAM = "python -m tools.compare"
SUMMARY = "several transcripts of the same audio as one HTML page, word by word"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code as `nemo-gpu-decoding` does."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, compare, given), "tools")


if __name__ == "__main__":
    sys.exit(main())
