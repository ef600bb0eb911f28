"""The table of the entry points of `compat` that keep the contract; a skipped check has the reason beside it."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding import AESConfig, AESPlusPlus
from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder
from nemo_gpu_decoding.search.result import NBest
from tests.contract.subject import VOCAB, LogProbs, Subject
from tests.contract.subjects import KINDS, FlexCTC, TransducerLSTM, changed
from tests.contract.tiny_models import FEATURES, WIDTH, normal, onnx_folder, parakeet
from tests.oracles.ngram import arpa_text, random_table


# ------------------------------------------------------------------ ONNX
class OnnxTransducerSubject(TransducerLSTM):
    """`OnnxTransducer`: the encoder's output, and the networks. Those of "int8" compute each row alone."""

    variants = ("rnnt", "tdt", "int8")

    def networks_of(self, variant, **changes):
        from nemo_gpu_decoding.compat.onnx import OnnxTransducer

        durations = KINDS["tdt" if variant == "int8" else variant]
        return OnnxTransducer(onnx_folder(len(durations), is_int8=variant == "int8", **changes), durations or None)

    def random_inputs(self, batch, frames, *, seed):
        return torch.stack(self.networks_of("rnnt").encode(list(normal(batch, FEATURES, frames, seed=seed))))


class OnnxAES(OnnxTransducerSubject):
    decoder, config = AESPlusPlus, AESConfig
    variants = ("tdt",)


class OnnxCTCSubject(FlexCTC):
    variants = ("max",)

    def random_inputs(self, batch, frames, *, seed):
        from nemo_gpu_decoding.compat.onnx import OnnxCTC

        return torch.stack(OnnxCTC(onnx_folder()).log_probs(list(normal(batch, FEATURES, frames, seed=seed))))


# ------------------------------------------------------------------ transformers
def parakeet_encoded(kind: str, batch: int, frames: int, seed: int) -> torch.Tensor:
    """What a decoder reads of a model; a frame is 8 of the features."""
    from nemo_gpu_decoding.compat.transformers import parakeet_inputs

    model = parakeet(kind)
    if frames == 0:
        return torch.zeros(batch, 0, VOCAB + 1 if kind == "ctc" else WIDTH)
    return parakeet_inputs(model, input_features=normal(batch, 8 * frames, 80, seed=seed))[0].clone()


class ParakeetSubject(TransducerLSTM):
    """`ParakeetForRNNT` and `ParakeetForTDT`: the encoder's output, and the networks."""

    def networks_of(self, variant, *, scale=1.0, bias=0.0, blank=0.0):
        from nemo_gpu_decoding.compat.transformers import parakeet_networks

        durations = {"durations": KINDS[variant]} if KINDS[variant] else {}
        networks = parakeet_networks(copy.deepcopy(parakeet(variant, **durations)))
        last = networks.output[-1]
        return changed(networks, last.weight.detach(), last.bias.detach(), scale, bias, blank)

    def random_inputs(self, batch, frames, *, seed):
        return parakeet_encoded("rnnt", batch, frames, seed)


class ParakeetAES(ParakeetSubject):
    decoder, config = AESPlusPlus, AESConfig


class ParakeetCTCSubject(FlexCTC):
    variants = ("max",)

    def random_inputs(self, batch, frames, *, seed):
        return parakeet_encoded("ctc", batch, frames, seed)


# ------------------------------------------------------------------ pyctcdecode
LETTERS = " abcdefghijk"


@dataclass(frozen=True)
class Beam:
    """An `OutputBeam` as the checks see it; tokens are the characters of the text."""

    tokens: np.ndarray
    text_frames: tuple[Any, ...]
    score: float
    logit_score: float

    def __len__(self) -> int:
        return len(self.tokens)


class Hotwords(NamedTuple):
    words: tuple[str, ...]


class Interface:
    """Both verbs as `Decoder.decode`. The text of `decode_batch` is the note of a result, so checks compare it."""

    def __init__(self, decoder: Any, threads: int | None) -> None:
        self.decoder, self.threads = decoder, threads

    def decode(
        self, inputs: Any, lengths: Any = None, requests: Sequence[Hotwords | None] | None = None
    ) -> list[NBest[Any]]:
        lengths = [len(row) for row in inputs] if lengths is None else lengths
        logits = [row[:length] for row, length in zip(inputs, lengths, strict=True)]
        options: dict[str, Any] = {"beam_width": 8, "token_min_logp": -20.0}
        if requests is not None:
            options |= {"hotwords": [request and request.words for request in requests], "hotword_weight": 6.0}
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self.threads or before)
            texts = self.decoder.decode_batch(None, logits, **options)
            beams = self.decoder.decode_beams_batch(None, logits, **options)
        finally:
            torch.set_num_threads(before)
        return [
            NBest(tuple(map(as_beam, own)), len(values), (text,))
            for values, text, own in zip(logits, texts, beams, strict=True)
        ]


def as_beam(beam: Any) -> Beam:
    tokens = np.array([LETTERS.index(character) for character in beam.text], int)
    return Beam(tokens, tuple(beam.text_frames), beam.lm_score, beam.logit_score)


WORDS = ("a", "b", "ab", "bad", "cab", "fig", "hijk", "gag", "e")


@lru_cache(maxsize=1)
def word_lm() -> Path:
    path = Path(mkdtemp()) / "words.arpa"
    path.write_text(arpa_text(random_table([*WORDS, "<unk>"], 2, 0.4, seed=5)))
    return path


class PyctcdecodeSubject(LogProbs):
    """`BeamSearchDecoderCTC`, without and with a word LM."""

    variants = ("tokens", "words")
    argument, score_of_nothing = "logits_list", None
    n_best = 8
    exempt: ClassVar = {
        "the interface reads whole utterances, and has no streams": (
            "test_decoder_has_all_verbs",
            "test_results_do_not_depend_on_chunks",
            "test_partial_follows_the_stream",
            "test_committed_tokens_stay",
            "test_partial_results_do_not_depend_on_commits",
            "test_partial_of_some_streams_equals_that_of_all",
            "test_partial_refuses_a_wrong_n_best",
            "test_results_do_not_depend_on_other_streams",
            "test_reopened_streams_take_no_more_memory",
            "test_bad_frame_does_not_change_other_streams",
            "test_wrong_rows_are_named",
            "test_chunks_without_frames_change_nothing",
            "test_push_takes_one_array_or_a_list",
            "test_refused_chunk_does_not_change_the_streams",
            "test_closed_streams_are_refused",
            "test_wrong_number_of_streams_is_named",
        ),
        "each utterance is an array of its own, without padding and lengths": (
            "test_padding_is_not_read",
            "test_padding_without_lengths_is_warned_of",
            "test_bad_lengths_are_named",
            "test_lengths_of_lists_are_those_of_each_array",
        ),
        "as in pyctcdecode, logits are arrays of any numbers; log_softmax is a part of the interface": (
            "test_bad_types_are_named",
            "test_arrays_of_other_libraries_give_the_same_results",
            "test_contiguous_arrays_are_not_copied",
            "test_values_above_zero_are_named",
            "test_logits_and_probabilities_are_named_with_the_way_out",
            "test_rows_that_are_not_normalised_are_warned_of_once",
        ),
        "beams have words, their frames and two scores; test_pyctcdecode.py compares these with all alignments": (
            "test_parts_add_up_to_the_score",
            "test_times_and_confidence_are_plausible",
        ),
        "hotwords and arguments of calls replace requests and configs; test_pyctcdecode.py checks what is refused": (
            "test_aliases_change_only_texts_of_their_utterance",
            "test_bad_shapes_are_named",
            "test_bad_requests_are_named",
            "test_boosting_weights_need_phrases",
            "test_options_of_a_wrong_type_or_size_are_named",
            "test_misspelt_options_are_named",
            "test_wrong_types_of_options_are_named",
        ),
    }

    def fused(self, variant, *, threads=None):
        lm = {"kenlm_model_path": word_lm(), "alpha": 0.6, "beta": 1.0} if variant == "words" else {}
        return Interface(build_ctcdecoder([*LETTERS, ""], **lm), threads)

    bare = fused

    def request(self):
        return Hotwords(("cab", "fig hijk"))

    def at(self, b, *place):
        return re.escape(f"{self.argument}[{b}][{', '.join(map(str, place))}]")


# name, class, backends
ENTRY_POINTS: list[tuple[str, type[Subject], tuple[str, ...]]] = [
    ("onnx alsd_pp", OnnxTransducerSubject, ("cpu",)),
    ("onnx aes_pp", OnnxAES, ("cpu",)),
    ("onnx flexctc_beam", OnnxCTCSubject, ("cpu",)),
    ("parakeet alsd_pp", ParakeetSubject, ("cpu",)),
    ("parakeet aes_pp", ParakeetAES, ("cpu",)),
    ("parakeet flexctc_beam", ParakeetCTCSubject, ("cpu",)),
    ("pyctcdecode", PyctcdecodeSubject, ("cpu",)),
]


def entry_points(*names: str) -> list[tuple[str, type[Subject], tuple[str, ...]]]:
    table = {row[0]: row for row in ENTRY_POINTS}
    return [table[name] for name in names]
