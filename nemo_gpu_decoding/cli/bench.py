"""`nemo-gpu-decoding bench`: the command line of `nemo_gpu_decoding.bench`."""

from __future__ import annotations

from nemo_gpu_decoding.bench.options import BenchOptions

OPTIONS = BenchOptions
EXAMPLES = (
    "out=bench.json",
    "peers=[nemo,flashlight,pyctcdecode] utterances=32 beams=[4,8,16] out=bench.json",
    "tasks=[speech] peers=[nemo] beams=[16] repeats=5 threads=2",
    "strategy=alsd_pp peers=[nemo] threads=2 out=alsd_pp.json",
    "strategy=cuda_wfst peers=[kaldi_decoder] out=cuda_wfst.json",
    "mode=live strategy=cuda_wfst graph_beams=[17] streams=[64,256] out=live.json",
    "mode=scale strategy=paged_biglm ngrams=1000000 graph_beams=[13] out=scale.json",
    "mode=cluster tasks=[speech] beams=[4] repeats=3 out=cluster.json",
    "device=cuda peers=[nemo] beams=[4,16,64] repeats=20 pair_seconds=3 out=gpu.json",
)


def run(options: BenchOptions) -> int:
    """Measure; the rows are printed, and written to `out`."""
    from nemo_gpu_decoding.bench.run import run as run_bench

    run_bench(options)
    return 0
