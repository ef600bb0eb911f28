"""The table of decoders that keep the contract, on each backend."""

from typing import Any

import torch

from nemo_gpu_decoding import (
    AESConfig,
    AESPlusPlus,
    ALSDConfig,
    ALSDPlusPlus,
    FlexCTCBeam,
    FlexCTCConfig,
    Request,
    build_word_boosting,
)
from nemo_gpu_decoding.graph.unknown_words import Speller
from nemo_gpu_decoding.search.word_graph.decoder import MOST_PARTIAL
from nemo_gpu_decoding.search.word_graph.result import emitted_labels
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.contract.subject import VOCAB, DensityRatio, LMPool, Locked, LogProbs, Subject, TokenFusion, WordGraph
from tests.graph.toy import PIECES
from tests.search.transducer.lstm import lstm_networks
from tests.search.transducer.table_networks import WIDTH, TableNetworks, random_frames

SEARCH = "nemo_gpu_decoding.search"
KINDS = {"rnnt": (), "tdt": (0, 1, 2, 4)}


def changed(networks: Any, weight: torch.Tensor, bias: torch.Tensor, scale: float, shift: float, blank: float) -> Any:
    """The networks after a change of their output layer in place, see `Transducer.networks_of`."""
    weight *= scale
    bias *= scale
    bias += shift
    bias[VOCAB] += blank
    return networks


class FlexCTC(LogProbs, TokenFusion):
    """The variants are the modes of `merge`."""

    variants = ("max", "sum", "prefix")
    usual = "max"
    most_partial, n_best = 8, 4
    insertion = 0.3

    def small_sizes(self):
        return {f"{SEARCH}.flexctc_beam.cuda_engine": {"THREADS": 32, "FINISH_THREADS": 32}}

    def make(self, vocab_size, blank_id, fusion=None, **options):
        return FlexCTCBeam(vocab_size, blank_id, FlexCTCConfig(backend=self.backend, **options), fusion)

    def with_fusion(self, variant, fusion, *, blank_id=VOCAB, **options):
        options = {"beam_size": 8, "n_best": self.n_best, "beam_beta": self.insertion, **options}
        return self.make(VOCAB, blank_id, fusion, merge=variant, **options)


class Transducer(TokenFusion):
    """The variants are the kinds of models. The tables' output for a row is exact: results are compared to the bit."""

    decoder, config = ALSDPlusPlus, ALSDConfig
    variants = tuple(KINDS)
    emulated_variants = ("tdt",)  # tests of the kernels have both
    usual = "tdt"
    argument, axes = "encoder_output", "[B, T, D]"
    width = WIDTH
    forbidden = (float("nan"), float("inf"), -float("inf"))
    most_partial, n_best = 6, 4
    lm_scores_the_end = False
    insertion = 0.3

    def make(self, networks, fusion=None, **options):
        if fusion and fusion.allowed:
            options = {"pruning_mode": "late", **options}
        return self.decoder(networks, self.config(backend=self.backend, **options), fusion)

    def with_fusion(self, variant, fusion, **options):
        options = {"beam_size": 6, "n_best": self.n_best, "alignments": True, "beam_beta": self.insertion, **options}
        return self.make(self.networks_of(variant), fusion, **options)

    def networks_of(self, variant: str, *, scale: float = 1.0, bias: float = 0.0, blank: float = 0.0) -> Any:
        """Logits are `scale` times those without options, plus `bias` and, for the blank, `blank`. 0: all alike."""
        networks = TableNetworks(VOCAB, KINDS[variant], seed=4)
        return changed(networks, networks.output, networks.bias, scale, bias, blank)

    def random_inputs(self, batch, frames, *, seed):
        return random_frames(batch, frames, seed=seed)

    def blank_only(self, variant):
        return self.make(self.networks_of(variant, blank=100.0), beam_size=4), self.random_inputs(1, 20, seed=3)

    def without_preference(self, variant):
        decoder = self.make(self.networks_of(variant, scale=0.0), beam_size=6, n_best=self.n_best, alignments=True)
        return decoder, torch.zeros(3, 6, self.width)

    def least_n_best(self, frames):
        return 2 if frames > 0 else 1

    def rating(self, path):
        return path.score / (len(path) + 1)

    def small_sizes(self):
        threads = ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS")
        return {f"{SEARCH}.transducer.records": dict.fromkeys(threads, 32) | {"FEWEST_PREDICTION_ROWS": 1}}

    def threads_for_little_work(self, monkeypatch):
        monkeypatch.setattr(f"{SEARCH}.transducer.cpu_engine.WORK_PER_THREAD", 0)

    def wrong_width(self, width):
        return rf"encoder_output has shape \(2, 5, {width}\), expected \[B, T, {self.width}\]"


class TransducerLSTM(Transducer):
    """An LSTM and a joint of plain torch modules, which run in compiled code."""

    def networks_of(self, variant, *, scale=1.0, bias=0.0, blank=0.0):
        networks = lstm_networks(VOCAB, KINDS[variant], seed=4, sharpness=2.0)
        last = networks.output[-1]
        return changed(networks, last.weight.detach(), last.bias.detach(), scale, bias, blank)


class AES(Transducer):
    decoder, config = AESPlusPlus, AESConfig


class AESLSTM(TransducerLSTM, AES):
    pass


class CudaWFSTSubject(WordGraph):
    width = 6

    def small_sizes(self):
        return {f"{SEARCH}.word_graph.kernel_abi": {"THREADS": 32, "CANDIDATES": 128, "LEAST_GROUPS": 64}}

    def make(self, **options):
        from tests.search.word_graph.models import make, toy_graph

        return make(toy_graph(0), **self._options(options))

    def request(self):
        from tests.search.word_graph.models import toy_graph

        boosting = build_word_boosting({"cab": 4.0, "a bb": 3.0}, toy_graph(0))
        return Request(boosting=boosting, boosting_weight=1.5, lm_weight=0.3)

    def _options(self, options):
        defaults = {"max_active": 200} if self.backend == "cuda" else {}
        return {"n_best": self.n_best, "backend": self.backend, **defaults, **options}


class Lattices(CudaWFSTSubject):
    """Alternatives come from lattices, which are looked at from the first frame on."""

    variants = ("normal",)
    n_best, most_partial, keeps_heads = 3, MOST_PARTIAL, False


class PagedBigLMSubject(CudaWFSTSubject):
    """Lazy composition; with LMs of which neither is part of the other."""

    emulated_variants = ("normal",)  # tests of the kernel have all

    def small_sizes(self):
        ((module, sizes),) = super().small_sizes().items()
        return {module: sizes | {"LM_QUERIES": 64, "CACHED_SCORES": 96}}

    def lms(self):
        from tests.search.word_graph.models import random_lm

        return random_lm(0), random_lm(10, keep=0.7)

    def make(self, **options):
        from tests.search.word_graph.models import make_paged

        return make_paged(*self.lms(), **self._options(options))

    def request(self):
        boosting = build_word_boosting({"cab": 4.0, "a bb": 3.0}, self.lms()[0].graph)
        return Request(boosting=boosting, boosting_weight=1.5, lm_weight=0.3)


class Let(PagedBigLMSubject):
    def make(self, **options):
        return super().make(composition="let", **options)


class DifferenceAutomaton(PagedBigLMSubject):
    """A small LM that is part of the large one, both in one automaton."""

    n_best, most_partial, keeps_heads = 3, MOST_PARTIAL, False

    def lms(self):
        from tests.search.word_graph.models import nested_pair

        return nested_pair(0)

    def make(self, **options):
        return super().make(difference="always", **options)


class LetLattices(DifferenceAutomaton):
    def make(self, **options):
        return super().make(composition="let", **options)


class NewWords(CudaWFSTSubject):
    """A request has words that the graph lacks; others read the graph without them."""

    variants = ("normal",)

    def graph(self):
        from tests.search.word_graph.models import random_lm

        return random_lm(0).graph

    def make(self, **options):
        from tests.search.word_graph.models import make

        return make(self.graph(), pieces=PIECES, **self._options(options))

    def request(self):
        speller = Speller(Vocabulary.from_pieces(PIECES), 0.3 / 1.5)
        graph = self.make().opened_graph
        boosting = build_word_boosting({"cab": 4.0, "ad": 5.0, "a bcd": 6.0}, graph, speller=speller)
        return Request(boosting=boosting, boosting_weight=1.5, lm_weight=0.3)

    def emitted(self, path, decoder):
        return emitted_labels(path.words, path.tokens, decoder.opened_graph, complete=True)


class PagedNewWords(NewWords, PagedBigLMSubject):
    composition = "lazy"

    def graph(self):
        from tests.search.word_graph.models import open_graph

        return open_graph(self.lms()[0].path)

    def make(self, **options):
        options = {"graph": self.graph(), "pieces": PIECES, "composition": self.composition, **options}
        return PagedBigLMSubject.make(self, **options)


class PagedClosed(PagedNewWords):
    graph = NewWords.graph


class LetNewWords(PagedClosed):
    composition = "let"


BOTH = ("cpu", "cuda")
TOKENS = {"flexctc_beam": FlexCTC, "alsd_pp": Transducer, "aes_pp": AES}
# Each is one automaton: one strategy passes all checks with it, the others those of `FUSION_CHECKS`.
FEATURES = {
    "allowed tokens": (Locked, "flexctc_beam"),
    "density ratio": (DensityRatio, "alsd_pp"),
    "lm pool": (LMPool, "aes_pp"),
}
FUSION_CHECKS = (
    "test_results_do_not_depend_on_chunks",
    "test_request_changes_only_its_utterance",
    "test_parts_of_scores_are_those_of_the_automata",
    "test_request_equals_a_decoder_with_its_fusion",
)


def with_feature(strategy: str, feature: str) -> type[Subject]:
    """A search over tokens with one more automaton."""
    (kind, whole), base = FEATURES[feature], TOKENS[strategy]
    only = None if strategy == whole else FUSION_CHECKS
    return type(f"{base.__name__}{kind.__name__}", (kind, base), {"variants": (base.usual,), "only": only})


# name, class, backends
TABLE: list[tuple[str, type[Subject], tuple[str, ...]]] = [
    *((name, kind, BOTH) for name, kind in TOKENS.items()),
    *((f"{name} {feature}", with_feature(name, feature), BOTH) for name in TOKENS for feature in FEATURES),
    ("alsd_pp lstm", TransducerLSTM, ("cpu",)),
    ("aes_pp lstm", AESLSTM, ("cpu",)),
    ("cuda_wfst", CudaWFSTSubject, BOTH),
    ("cuda_wfst lattices", Lattices, BOTH),
    ("paged_biglm", PagedBigLMSubject, BOTH),
    ("paged_biglm let", Let, ("cpu",)),
    ("paged_biglm let lattices", LetLattices, ("cpu",)),
    ("cuda_wfst new words", NewWords, BOTH),
    ("paged_biglm new words", PagedClosed, BOTH),
    ("paged_biglm open vocabulary", PagedNewWords, ("cpu",)),
    ("paged_biglm let new words", LetNewWords, ("cpu",)),
    ("paged_biglm difference", DifferenceAutomaton, BOTH),
]


def fused(strategy: str) -> list[str]:
    """The rows of a search over tokens: plain, and with each feature."""
    return [strategy, *(f"{strategy} {feature}" for feature in FEATURES)]


def rows(backend: str, *names: str) -> list[tuple[str, type[Subject], tuple[str, ...]]]:
    """The rows of the table with these names, for one backend alone."""
    table = {name: (name, kind, (backend,)) for name, kind, backends in TABLE if backend in backends}
    return [table[name] for name in names]
