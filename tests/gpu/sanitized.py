"""A little of everything that the kernels do, in a process of its own.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitized cuda:0

Prints a digest of all results: a run under a tool must print what a run without prints. Small, because a tool makes
kernels up to a thousand times slower. The name of a kernel of kernels.cu as second argument runs that instead.
"""

import hashlib
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor, runtime
from nemo_gpu_decoding.search.result import NBest
from tests.contract.subject import facts
from tests.gpu import test_transducer_gpu
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda, random_fusion
from tests.search.word_graph import both as word_graph

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
    for results in (*word_graphs(device), *transducers(device)):
        add(digest, results)
    return digest.hexdigest()


def word_graphs(device: torch.device) -> Iterator[list[NBest]]:
    """Best paths, lattices, and composition with a large LM on the device."""
    columns = word_graph.RANDOM_COLUMNS
    log_probs = random_log_probs(2, 5, columns, seed=4, sharpness=0.7).to(device)
    graph, lms = word_graph.random_case(1)
    options = {"vocab_size": columns - 1, "blank_id": columns - 1, "max_active": 60, "beam": 8.0}
    for lattice in (False, True):
        yield word_graph.on_cuda(graph, lattice=lattice, **options).decode(log_probs, [5, 3])
    yield word_graph.on("cuda", graph, lms, max_active=60).decode(log_probs, [5, 3])


def transducers(device: torch.device) -> Iterator[list[tuple[int, ...]]]:
    """Tokens alone, as products may round differently. Launched one by one: allocations of a tool break a capture."""
    frames = test_transducer_gpu.frames_of(2, 4).to(device)
    strategies, model = test_transducer_gpu.STRATEGIES.values(), test_transducer_gpu.Model
    for strategy, networks in product(strategies, (model.networks, model.stateless)):
        options = {"networks": networks, "allow_cuda_graphs": False}
        decoder, _ = test_transducer_gpu.both(strategy, device, (0, 1, 2), **options)
        yield [tuple(nbest.best.tokens.tolist()) for nbest in decoder.decode(frames, [4, 2])]


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


def add(digest, results: list[Any]) -> None:
    digest.update(repr([facts(found) if isinstance(found, NBest) else found for found in results]).encode())


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
