"""Make the small models with which both backends decode in the self-check (`self_check.py`).

    python -m nemo_gpu_decoding.search.built_in_problems flexctc_beam 0     # the strategy, and the number of the GPU

Weights and scores are multiples of 1/8. So there are ties, matrix products are exact, and results are equal to the
bit. An LSTM's gates are rounded differently on each device: scores with an LSTM may differ by `ROUNDING`.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nemo_gpu_decoding.fusion.context_graph import ScoredSequence, build_context_graph
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.search.self_check import Verdict
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
from nemo_gpu_decoding.search.word_graph import cuda_engine
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM

V, FRAMES, WIDTH, STATES = 20, 14, 8, 10  # tokens; frames; size of networks' layers; states of graphs
CHUNKS = ((6, 6), (0, 8))  # frames of both utterances in each push
WORDS = tuple(map(str, range(V)))  # of LMs over tokens, and of graphs but for the first one
ROUNDING = 1e-3

CPU = torch.device("cpu")

Problem = tuple[Any, Any, Tensor, float]  # decoders on the CPU and on the device, inputs, tolerance of scores


def numbers(seed: int, *shape: int, most: int = 4) -> Tensor:
    """Return multiples of 1/8 from -most to most."""
    return torch.from_numpy(np.random.RandomState(seed).randint(-8 * most, 8 * most + 1, shape) / 8).float()


def lm(order: int, load: Callable[[Path], Any]) -> Any:
    """Return a random LM; an LM of higher order has all n-grams of the lower-order LMs, with other scores."""
    draw, weight = np.random.RandomState(1), np.random.RandomState(order)
    levels, lines = [["<s>", "</s>", "<unk>", *WORDS]], []
    for n in range(1, order + 1):
        contexts = [gram for gram in levels[-1] if n < order and not gram.endswith(("</s>", "<unk>", "3", "7"))]
        lines.append(f"\n\\{n}-grams:")
        for gram in levels[-1]:
            backoff = f"\t-{weight.randint(9) / 8}" if gram in contexts else ""
            lines.append(f"-{weight.randint(1, 20) / 8}\t{gram}{backoff}")
        levels.append([f"{gram} {word}" for gram in contexts for word in ("</s>", *WORDS) if draw.rand() < 0.3])
    counts = [f"ngram {n}={len(level)}" for n, level in enumerate(levels[:order], 1)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "built-in.arpa"
        path.write_text("\n".join(["\\data\\", *counts, *lines, "\n\\end\\\n"]))
        return load(path)


def phrases(*sequences: list[int]) -> Any:
    """Return a boosting tree over tokens, or over the words of a graph."""
    return build_context_graph([ScoredSequence(tokens, np.full(len(tokens), 1.5), 1.5) for tokens in sequences], V)


def token_fusion() -> Fusion:
    return Fusion(lm(3, partial(load_ngram_lm, vocab_size=V, encoding="ids")), 0.5, TREE, 0.75)


def log_probs(blank: int) -> Tensor:
    """Return log-probs [2, FRAMES, V + 1] in which blanks and repeats are likely."""
    values = numbers(3, 2, FRAMES // 2, V + 1, most=2).repeat_interleave(2, 1) + numbers(4, 2, FRAMES, V + 1, most=1)
    return torch.log_softmax(values + 1.5 * (torch.arange(V + 1) == blank), dim=-1)


TREE, OTHER_TREE = phrases([1, 2], [2, 3, 4], [5]), phrases([7, 8, 7], [3], [4, 4])


# ----------------------------------------------------------------------------------------- problems


def flexctc_beam(device: torch.device) -> Iterator[Problem]:
    fusion = token_fusion()
    for merge in ("max", "sum", "prefix"):
        pruned: dict[str, Any] = {"beam_beta": 0.5, "beam_threshold": 2.0 if merge == "max" else 6.0}
        config = FlexCTCConfig(beam_size=8, n_best=8, merge=merge, alignments=merge != "prefix", threads=1, **pruned)
        decoder = FlexCTCBeam(V, 3, config, fusion)
        yield decoder, decoder, log_probs(3), 0.0


def networks(device: torch.device, is_timed: bool) -> LSTMNetworks | StatelessNetworks:
    """Return networks with an LSTM or, for TDT, stateless networks."""
    durations = (0, 1, 2) if is_timed else ()
    linear, embedding = nn.Linear, partial(nn.Embedding, V + 1)
    output = nn.Sequential(nn.ReLU(), linear(WIDTH, V + 1 + len(durations)))
    parts: Any = [linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), output]
    prediction: Any = [embedding(WIDTH // 2), embedding(WIDTH // 2)]
    if not is_timed:
        prediction = [embedding(WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2)]
    for seed, weight in enumerate(nn.ModuleList([*parts, *prediction]).parameters()):
        weight.data = numbers(seed, *weight.shape, most=1).to(device)
    output[1].bias.data = 6.0 * (torch.arange(V + 1 + len(durations), device=device) == V)  # favours the blank
    if not is_timed:
        return LSTMNetworks(*prediction, *parts)
    return StatelessNetworks(prediction, nn.Identity(), *parts, durations=durations)


def transducer(make: Any, beam_size: int, most_symbols: str, device: torch.device) -> Iterator[Problem]:
    fusion, frames = token_fusion(), numbers(4, 2, FRAMES, WIDTH)
    of_nemo: dict[str, Any] = {"pruning_mode": "early", "blank_lm_score_mode": "no_score", "allow_cuda_graphs": False}
    early = make.config_type(beam_size=beam_size, n_best=4, threads=1, **{most_symbols: 2}, **of_nemo)
    late = replace(early, pruning_mode="late", blank_lm_score_mode="lm_weighted_full", allow_cuda_graphs=True)
    late = replace(late, beam_beta=0.5, softmax_temperature=2.0, alignments=True)
    for is_timed, config, tolerance in ((True, late, 0.0), (True, early, 0.0), (False, late, ROUNDING)):
        on_cpu, on_gpu = (make(networks(where, is_timed), config, fusion) for where in (CPU, device))
        yield on_cpu, on_gpu, frames, tolerance


def word_graph() -> WordGraph:
    """Return a random graph: most arcs have words, the first state has many arcs, epsilons lead to the next state."""
    draw = np.random.RandomState(5).randint
    rows: Any = [(draw(STATES) * (i % 3 == 0), draw(6) + 1, draw(V), draw(-1, 3), 3 * draw(4)) for i in range(180)]
    rows += [(state, 0, state % 6, 0.25, state + 1) for state in range(STATES - 1)]
    finals = np.array([1.0, 0.5, 0.0, np.inf])[np.arange(STATES) % 4]
    return WordGraph.from_fst(Fst.from_arcs(0, finals, *map(np.array, zip(*rows, strict=True))), ("<eps>", *WORDS[1:]))


def on_word_graph(make: Callable[..., Any], config_type: Any, *variants: dict[str, Any]) -> Iterator[Problem]:
    fusion = Fusion(boosting=TREE, boosting_weight=0.25)
    for variant in variants:
        config = config_type(threads=1, **{"beam": 7.0, "max_active": 12, **variant})
        decoder = make(config=config, fusion=fusion)
        yield decoder, decoder, log_probs(V), 0.0


def cuda_wfst(device: torch.device) -> Iterator[Problem]:
    widened = {"topology": "minimal", "min_active": 40, "max_active": 40, "beam": 1.5}
    variants = {"n_best": 4, "lattice_beam": 2.0}, {"topology": "normal"}, widened
    return on_word_graph(partial(CudaWFST, word_graph(), V, V), WFSTConfig, *variants)


def paged_biglm(device: torch.device) -> Iterator[Problem]:
    make = partial(PagedBigLM, word_graph(), V, V, lm(3, pack_arpa_in_memory), lm(2, pack_arpa_in_memory))
    variants = {"difference": "always"}, {"difference": "never", "placement": "paged", "n_best": 4, "group_size": 2}
    return on_word_graph(make, PagedBigLMConfig, *variants)


PROBLEMS: dict[str, Callable[[torch.device], Iterator[Problem]]] = {
    "flexctc_beam": flexctc_beam,
    "alsd_pp": partial(transducer, ALSDPlusPlus, 4, "max_symbols"),
    "aes_pp": partial(transducer, AESPlusPlus, 6, "maes_num_steps"),
    "cuda_wfst": cuda_wfst,
    "paged_biglm": paged_biglm,
}


# --------------------------------------------------------------------------------------- comparison


def first_difference(strategy: str, device: torch.device) -> str | None:
    """Return the first difference between the results of kernels and CPU search, or None if they are equal."""
    for number, (on_cpu, on_gpu, inputs, tolerance) in enumerate(PROBLEMS[strategy](device), 1):
        expected, found = decoded(on_cpu, inputs, None), decoded(on_gpu, inputs, device)
        for name in expected | found:
            wanted, value = expected.get(name), found.get(name)
            if not _are_same(wanted, value, tolerance):
                return f"problem {number}, {name} is {str(value)[:80]}, on the CPU {str(wanted)[:80]}"
    return None


def decoded(decoder: Any, inputs: Tensor, device: torch.device | None) -> dict[str, Any]:
    """Return all results of two utterances after each chunk and at the end; `device` None selects the CPU search."""
    streams = decoder.open(2, [None, Request(OTHER_TREE, 0.25)])
    streams.engine = decoder._cuda_engine(streams, device) if device else decoder._cpu_engine(streams)
    results: list[NBest] = []
    for begin, lengths in zip((0, 6), CHUNKS, strict=True):
        decoder.push(streams, inputs[:, begin : begin + max(lengths)].to(device or CPU), lengths)
        results += decoder.partial(streams)
    facts = {}
    for r, nbest in enumerate([*results, *decoder.close(streams)]):
        for name in ("num_frames", "notes", "committed", "relative_cost"):
            facts[f"result {r}, {name}"] = getattr(nbest, name)
        for n, path in enumerate(nbest):
            values = {**vars(path), "parts": np.array([*vars(path.parts).values()])}
            facts |= {f"result {r}, {name} of hypothesis {n}": value for name, value in values.items()}
    return facts


def _are_same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, np.ndarray | float) and type(a) is type(b):
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=0.0, atol=tolerance)
    return a == b


def verdict_on(strategy: str, device: torch.device) -> Verdict:
    """Check the kernels twice: the first run compiles them, and the second run is timed."""
    difference, begin = None, 0.0
    try:
        for _ in range(2):
            begin = time.perf_counter()
            difference = difference or first_difference(strategy, device)
    except torch.cuda.OutOfMemoryError as error:
        return Verdict(str(error), is_kept=False)
    except Exception as error:  # a fault of a kernel; CUDA's libraries raise many types
        difference = f"{type(error).__name__}: {error}".split("\n", 1)[0]
    return Verdict(difference, time.perf_counter() - begin)


def main(strategy: str, gpu: str) -> None:
    """Print the result of the check, or null if the GPU cannot be used."""
    device = torch.device("cuda", int(gpu))
    torch.set_float32_matmul_precision("highest")
    cuda_engine.FIRST_BACK_POINTERS = 64  # of word graphs: full arrays are compacted
    try:
        torch.zeros(1, device=device)
    except Exception:  # torch raises many types
        print("null")
    else:
        print(json.dumps(asdict(verdict_on(strategy, device))))


if __name__ == "__main__":
    main(*sys.argv[1:])
