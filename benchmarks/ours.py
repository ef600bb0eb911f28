"""The strategies as `Peer`s, baselines of paged_biglm, and the graphs and LMs of tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.eager import BoundedEager, Eager, EagerGroups
from benchmarks.files import cache_dir, cached, content_key
from benchmarks.options import BenchOptions
from benchmarks.peers.base import Hypothesis, Peer, Ready, Setting, device_of
from benchmarks.tasks import Task
from nemo_gpu_decoding import (
    AESConfig,
    AESPlusPlus,
    ALSDConfig,
    ALSDPlusPlus,
    BoostingConfig,
    CudaWFST,
    FlexCTCBeam,
    FlexCTCConfig,
    Fusion,
    PagedBigLM,
    PagedBigLMConfig,
    WFSTConfig,
    build_boosting_tree,
    build_graph,
    load_ngram_lm,
    load_packed_lm,
    pack_arpa,
    prune_ngram_lm,
    write_arpa,
)
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.packed import PackedLM

LARGE, SMALL = "large", "small"  # which LM: the task's, or the one that is pruned from it


def flexctc_beam(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    beta, fusion = task.weights.beam_beta if setting.lm else 0.0, fusion_of(task, setting)
    config = FlexCTCConfig(beam_size=setting.beam_size, beam_beta=beta, **_common(options, setting))
    decoder = FlexCTCBeam(task.vocab_size, task.vocab_size, config, fusion)
    return ready(decoder)._replace(fusion=fusion, beam_beta=beta)


def alsd_pp(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    config = ALSDConfig(beam_size=setting.beam_size, max_symbols=options.max_symbols, **_common(options, setting))
    return ready(ALSDPlusPlus(_networks(options, task), config, fusion_of(task, setting)))


def aes_pp(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    # late pruning, as NeMo's default
    config = AESConfig(beam_size=setting.beam_size, pruning_mode="late", **_common(options, setting))
    return ready(AESPlusPlus(_networks(options, task), config, fusion_of(task, setting)))


def cuda_wfst(which: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """Search on the graph of the task's LM; on that of the small LM it is the baseline without a large LM."""
    config = WFSTConfig(**graph_search(options, task, setting))
    return ready(CudaWFST(word_graph(task, which), task.vocab_size, task.vocab_size, config))


def other_topology(topology: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """cuda_wfst with this CTC topology in place of that of the options."""
    return cuda_wfst(LARGE, replace(options, topology=topology), task, setting)


def paged_biglm(composition: str, options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """Search with a composition of the config, or one of `ABLATIONS`."""
    search, decoder = graph_search(options, task, setting), ABLATIONS.get(composition, PagedBigLM)
    named = "lazy" if composition in ABLATIONS else composition
    search |= {"placement": setting.placement, "cache_mb": options.cache_mb}
    search |= {"group_size": 0 if composition in ABLATIONS else setting.group_size}
    config = PagedBigLMConfig(composition=named, **search)
    lms = packed_lm(task, LARGE), packed_lm(task, SMALL)
    return ready(decoder(word_graph(task, SMALL), task.vocab_size, task.vocab_size, *lms, config))


class TwoPass(CudaWFST):
    """Search with the small LM; the large LM rescores the lattices."""

    large: PackedLM

    def decode(self, *batch: Any, **options: Any) -> list[Any]:
        found = [nbest.lattice for nbest in super().decode(*batch, **options)]
        return [self.n_best(lattice.rescored(self.large, 1.0)) for lattice in found if lattice is not None]


def two_pass(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """The lattice of the small LM, rescored; with the default lattice beam."""
    config = WFSTConfig(lattice=True, **graph_search(options, task, setting))
    decoder = TwoPass(word_graph(task, SMALL), task.vocab_size, task.vocab_size, config)
    decoder.large = packed_lm(task, LARGE)
    return ready(decoder)


OURS: dict[str, Any] = {
    "flexctc_beam": flexctc_beam, "alsd_pp": alsd_pp, "aes_pp": aes_pp, "cuda_wfst": partial(cuda_wfst, LARGE),
    "paged_biglm": partial(paged_biglm, "lazy"),
}  # fmt: skip
ABLATIONS: dict[str, type[PagedBigLM]] = {"eager": Eager, "bounded_eager": BoundedEager, "eager_groups": EagerGroups}
# Peers of paged_biglm: the graph of the large LM, that of the small LM alone, and other compositions
LARGE_LM, SMALL_LM = (Peer(f"{lm}_lm", partial(cuda_wfst, lm), multithreaded=True) for lm in (LARGE, SMALL))
COMPACT, NORMAL, MINIMAL = (
    Peer(name, partial(other_topology, name), multithreaded=True) for name in ("compact", "normal", "minimal")
)
TWO_PASS = Peer("two_pass", two_pass, multithreaded=True)
LET, EAGER, BOUNDED_EAGER, EAGER_GROUPS = (
    Peer(name, partial(paged_biglm, name), multithreaded=True) for name in ("let", *ABLATIONS)
)
ONE_THREAD = Peer(
    "one_thread", lambda options, task, setting: paged_biglm("lazy", options, task, setting._replace(threads=1))
)


def on_cpu(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    """The strategy on the CPU, beside itself on the GPU. The copy of the batch to the host counts."""
    decoder = OURS[options.strategy](replace(options, device="cpu"), task, setting)
    return decoder._replace(run=lambda inputs, lengths: decoder.run(inputs.cpu(), lengths.cpu()))


ON_CPU = {strategy: Peer("on_cpu", on_cpu, multithreaded=True) for strategy in OURS}


def ready(decoder: Any) -> Ready:
    """The `Ready` of a decoder of this package."""

    def labels(path: Any) -> list[int]:
        return [word.label for word in path.words] if hasattr(path, "words") else path.tokens.tolist()

    return Ready(
        decoder.decode,
        lambda found: [n.best.text if hasattr(n.best, "words") else n.best.tokens.tolist() for n in found],
        lambda *batch: [[Hypothesis(labels(path), path.score) for path in n] for n in decoder.decode(*batch)],
        decoder=decoder,
    )


def graph_search(options: BenchOptions, task: Task, setting: Setting) -> dict[str, Any]:
    """Options of both searches of word graphs."""
    return {
        "topology": options.topology,
        "beam": float(setting.beam_size),
        "max_active": options.max_active,
        "acoustic_scale": task.weights.acoustic_scale,
        **_common(options, setting),
    }


def _common(options: BenchOptions, setting: Setting) -> dict[str, Any]:
    return {"threads": setting.threads, "backend": "cpu" if options.device == "cpu" else "cuda"}


def fusion_of(task: Task, setting: Setting) -> Fusion:
    """LM and boosting tree of a setting.

    Refunds are those of NeMo, so that hypotheses can be compared with NeMo's one by one.
    """
    lm = boosting = None
    if setting.lm and task.lm:
        lm = load_ngram_lm(task.lm, task.vocab_size, encoding="nemo")
    if setting.phrases:
        phrases = task.phrases(setting.phrases)
        boosting = build_boosting_tree(phrases, task.vocabulary, BoostingConfig(refund="nemo"))
    return Fusion(lm, task.weights.lm_weight, boosting, task.weights.boosting_weight)


def _networks(options: BenchOptions, task: Task) -> Any:
    assert task.transducer is not None
    networks = task.transducer.ours()
    for part in vars(networks).values():
        if isinstance(part, torch.nn.Module):
            part.to(device_of(options, task))
    return networks


# ----------------------------------------------------------------------------------- graphs and LMs


@lru_cache(maxsize=4)
def word_lm(task: Task, which: str) -> Path:
    """The task's word LM, or the small LM that is pruned from it."""
    source, share = task.word_lm, task.weights.small_share
    assert source is not None

    def prune(target: Path) -> None:
        arpa = read_arpa(source)
        counts = [len(order.symbols) for order in arpa.orders]
        write_arpa(prune_ngram_lm(arpa, size=max(counts[0] + 1, int(share * sum(counts)))), target)

    return cached(f"{content_key(source)}-{share:g}.arpa", prune) if which == SMALL else source


@lru_cache(maxsize=4)
def word_graph(task: Task, which: str) -> WordGraph:
    """L o G of one of these LMs; words are spelled by the task's lexicon, else by its tokenizer."""
    lexicon: Any = task.vocabulary
    if task.lexicon:
        lexicon = Lexicon({word: (tuple(spelling),) for word, spelling in task.lexicon.items()}, task.vocab_size)
    return build_graph(word_lm(task, which), lexicon, cache=cache_dir() / "graphs")


@lru_cache(maxsize=4)
def packed_lm(task: Task, which: str) -> PackedLM:
    """One of these LMs, packed."""
    source = word_lm(task, which)
    return load_packed_lm(cached(f"{content_key(source)}.packed", lambda path: pack_arpa(source, path)))


def describe_graph(graph: WordGraph) -> dict[str, int]:
    """Sizes of a graph, for the header."""
    return {
        "ngrams": int(graph.report["n-grams"]),
        "words": len(graph.words) - 1,
        "states": graph.num_states,
        "arcs": graph.num_arcs,
    }


def contexts_per_group(decoder: PagedBigLM, task: Task) -> dict[int, int]:
    """The number of token groups with 1, 2, ... LM contexts at the ends of all frames, with lazy composition."""
    streams, found = decoder.open(len(task.lengths)), Counter[int]()
    for t in range(int(task.lengths.max())):
        sizes = [int(t < length) for length in task.lengths.tolist()]
        decoder.push(streams, task.inputs[:, t : t + 1], sizes)
        engine: Any = streams.engine
        for stream in [stream for stream, size in zip(engine._streams, sizes, strict=True) if size]:
            groups, lms = stream.tokens["key"] >> 16, stream.tokens["lm"]
            found.update(Counter(group for group, _ in set(zip(groups.tolist(), lms.tolist(), strict=True))).values())
    return dict(sorted(found.items()))


def work_per_frame(results: Any) -> dict[str, float]:
    """Counters per frame, see `Work` of paged_biglm; empty for a search without a large LM."""
    works = [work for work in (getattr(nbest, "work", None) for nbest in results) if work is not None]
    frames = max(1, sum(work.frames for work in works))
    names = [name for name in works[0]._fields if name != "frames"] if works else []
    per_frame = {name: round(sum(getattr(work, name) for work in works) / frames, 3) for name in names}
    arcs = sum(work.cache_hits + work.cache_misses for work in works)
    return per_frame | ({"cache_hit_rate": sum(work.cache_hits for work in works) / arcs} if arcs else {})
