"""`python -m benchmarks key=value ...`: the command line of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.options import BenchOptions
from nemo_gpu_decoding.cli.main import guarded, run_program

PROGRAM = "python -m benchmarks"
SUMMARY = "measure our decoders beside others, after checking that results agree"
OPTIONS = BenchOptions
EXAMPLES = (
    "out=bench.json",
    "peers=[nemo,flashlight,pyctcdecode] utterances=32 beams=[4,8,16] out=bench.json",
    "tasks=[hard] peers=[nemo] beams=[16] repeats=5 threads=2",
    "strategy=alsd_pp peers=[nemo] threads=2 out=alsd_pp.json",
    "strategy=cuda_wfst peers=[kaldi_decoder] out=cuda_wfst.json",
    "mode=live strategy=cuda_wfst graph_beams=[17] streams=[64,256] out=live.json",
    "mode=scale strategy=paged_biglm ngrams=1000000 graph_beams=[13] out=scale.json",
    "mode=cluster tasks=[hard] beams=[4] repeats=3 out=cluster.json",
    "device=cuda peers=[nemo] beams=[4,16,64] repeats=20 pair_seconds=3 out=gpu.json",
)


def run(options: BenchOptions) -> int:
    """Measure; print the rows and write them to `out`."""
    from benchmarks.run import run as measure

    measure(options)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code as `nemo-gpu-decoding` does."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], given), "benchmarks")


if __name__ == "__main__":
    sys.exit(main())
