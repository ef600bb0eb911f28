"""A little of everything that the kernels do, in a process of its own.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized cuda:0

Prints a digest of all results: a run under a tool must print what a run without prints. Small, because
a tool makes kernels up to a thousand times slower. The name of a kernel of kernels.cu as second
argument runs that instead.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor, runtime
from nemo_gpu_decoding.search.result import NBest
from tests.contract.subject import facts
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda, random_fusion

V, T = 70, 9
LENGTHS = [9, 0, 5]
FAULTY = Path(__file__).with_name("kernels.cu")


def everything(device: torch.device) -> str:
    """Decode in all ways that differ for the kernels; a digest of the results."""
    digest = hashlib.sha256()
    for merge in ("max", "sum", "prefix"):
        for beam_size, dtype, sharpness in (
            (1, torch.float32, 3.0),
            (5, torch.float16, 3.0),
            (33, torch.bfloat16, 0.3),
            (128, torch.float32, 0.3),
        ):
            log_probs = random_log_probs(3, T, V + 1, seed=beam_size, sharpness=sharpness)
            decoder = on_cuda(V, V, random_fusion(V), merge=merge, beam_size=beam_size, n_best=beam_size)
            add(digest, decoder.decode(log_probs.to(device, dtype), LENGTHS))
        add(digest, in_chunks(merge, device))
        add(digest, long_rows(merge, device))
    return digest.hexdigest()


def in_chunks(merge: str, device: torch.device) -> list[NBest]:
    """Beams come back from global memory; lengths lie on the device; alignments are traced."""
    log_probs = random_log_probs(3, T, V + 1, seed=2).to(device)
    options = {} if merge == "prefix" else {"alignments": True}
    decoder = on_cuda(V, V, random_fusion(V), merge=merge, beam_size=8, n_best=4, **options)
    streams = decoder.open(3)
    for begin in range(0, T, 4):
        lengths = (torch.tensor(LENGTHS) - begin).clamp(0, min(4, T - begin)).to(device)
        decoder.push(streams, log_probs[:, begin : begin + 4], lengths)
        decoder.partial(streams)
    return decoder.close(streams)


def long_rows(merge: str, device: torch.device) -> list[NBest]:
    """Rows that are read from global memory, in many parts."""
    columns = 80_001
    log_probs = random_log_probs(1, 2, columns, seed=3, sharpness=4.0).to(device)
    return on_cuda(columns - 1, columns - 1, merge=merge, beam_size=4).decode(log_probs, [2])


def add(digest, results: list[NBest]) -> None:
    digest.update(repr([facts(nbest) for nbest in results]).encode())


def faulty(kernel: str, device: torch.device) -> None:
    out = torch.zeros(128, dtype=torch.int32, device=device)
    signature = Signature(kernel, {"out": Tensor(torch.int32, (128,))})
    runtime().load(str(FAULTY), device).launch(signature, grid=1, block=128, out=out)
    out.cpu()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        faulty(sys.argv[2], torch.device(sys.argv[1]))
    else:
        print(everything(torch.device(sys.argv[1])))
