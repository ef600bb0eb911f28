"""What tests do with a model, and the strategies as they see them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

# what most tests run with, as `strategy_case` takes them: each strategy, RNN-T and TDT in turn
CASES = ["flexctc_beam", "alsd_pp-rnnt", "aes_pp-tdt", "cuda_wfst", "paged_biglm"]
# each strategy on each kind of model that it is for
EVERY_CASE = [
    "flexctc_beam", "alsd_pp-rnnt", "alsd_pp-tdt", "aes_pp-rnnt", "aes_pp-tdt",
    "cuda_wfst", "paged_biglm",
]  # fmt: skip


def transcribed(model, cfg, audio, **kwargs):
    """What `transcribe` returns with a decoding config; None keeps the one that the model has."""
    if cfg is not None:
        model.change_decoding_strategy(cfg, verbose=False)
    return model.transcribe(audio, verbose=False, **kwargs)


def predicted(decoding, inputs, **kwargs):
    """What a decoding object of NeMo's makes of stored log-probs or encoder output, and lengths."""
    kwargs = {"return_hypotheses": True, **kwargs}
    if hasattr(decoding, "ctc_decoder_predictions_tensor"):
        return decoding.ctc_decoder_predictions_tensor(*inputs[:2], **kwargs)
    return decoding.rnnt_decoder_predictions_tensor(*inputs[:2], **kwargs)


def decoded(model, cfg, inputs, **kwargs):
    """As `predicted`, with a decoding config."""
    model.change_decoding_strategy(cfg, verbose=False)
    return predicted(model.decoding, inputs, **kwargs)


def texts(hypotheses):
    return [hypothesis.text for hypothesis in hypotheses]


def write_manifest(path, utterances):
    path.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    return str(path)


@dataclass(frozen=True)
class Case:
    """A strategy on a model that it is for."""

    strategy: str
    model: Any
    inputs: tuple[torch.Tensor, torch.Tensor]  # what it decodes: log-probs or encoder output, lengths
    section: str  # of the decoding config
    options: dict[str, Any]  # in that section
    phrase_weight: float  # that makes "graam" of "graham"
    lm: dict[str, Any] = field(default_factory=dict)  # options that add an LM over tokens
    several: dict[str, Any] = field(default_factory=dict)  # options for up to three hypotheses
    own: dict[str, Any] = field(default_factory=dict)  # options that no other strategy has

    @property
    def is_transducer(self) -> bool:
        return self.strategy in ("alsd_pp", "aes_pp")

    @property
    def has_words(self) -> bool:
        return self.section == "wfst"

    @property
    def infer(self) -> Any:
        """The object that NeMo's decoding object calls."""
        return self.model.decoding.decoding

    def cfg(self, top=None, **options):
        section = {**self.options, **options}
        return {"strategy": self.strategy, self.section: section, **(top or {})}

    def use(self, top=None, **options) -> None:
        self.model.change_decoding_strategy(self.cfg(top, **options), verbose=False)

    def decode(self, top=None, **options):
        return decoded(self.model, self.cfg(top, **options), self.inputs)

    def texts(self, audio, **kwargs):
        """By the decoding that the model has now."""
        return texts(self.model.transcribe(audio, verbose=False, **kwargs))

    def phrases(self, *phrases):
        tree = {"key_phrases_list": list(phrases)}
        return {"boosting_tree": tree, "boosting_tree_alpha": self.phrase_weight}

    def added(self, *words):
        """Options for words that only requests boost: a graph has to have them."""
        return {"added_words": list(words)} if self.has_words else {}

    def frames(self, values, utterance):
        """[T, width], a view of an utterance's row of the inputs."""
        return values[utterance].T if self.is_transducer else values[utterance]


def strategy_case(name, request) -> Case:
    """`name`: a strategy, for transducers with the kind of the model, as in "alsd_pp-tdt"."""
    strategy, _, kind = name.partition("-")
    assets = request.getfixturevalue("assets")
    if kind:
        model = request.getfixturevalue({"rnnt": "hybrid_model", "tdt": "tdt_model"}[kind])
        encode, utterances = (request.getfixturevalue(f) for f in ("encoded_by", "utterances"))
        return Case(
            strategy, model, encode(model, utterances), "beam", {"beam_size": 8}, 1.0,
            lm={"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.3},
            several={"return_best_hypothesis": False, "n_best": 3, "score_norm": False},
            own={"blank_lm_score_mode": "no_score", "pruning_mode": "early"},
        )  # fmt: skip
    # decodings of the emissions leave the model with NeMo's greedy decoding, as `ctc_model` has it
    inputs, model = (request.getfixturevalue(f) for f in ("emissions", "ctc_model"))
    if strategy == "flexctc_beam":
        lm = {"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.7}
        return Case(
            strategy, model, inputs, "beam", {"beam_size": 8, "beam_beta": 0.0}, 1.0,
            lm={**lm, "beam_beta": 1.0},
            several={"return_best_hypothesis": False, "n_best": 3, "beam_size": 16},
            own={"merge": "prefix"},
        )  # fmt: skip
    several = {"return_best_hypothesis": False, "beam_size": 3}
    if strategy == "cuda_wfst":
        options = {"arpa_lm_path": str(request.getfixturevalue("word_lm")), "beam_width": 16.0}
        own = {"decoding_mode": "mbr"}
    else:
        small, packed = (request.getfixturevalue(f) for f in ("small_word_lm", "packed_word_lm"))
        options = {"arpa_lm_path": str(small), "large_lm_path": str(packed), "beam_width": 20.0}
        own = {"group_size": 8, "large_lm_weight": 0.9}
    return Case(strategy, model, inputs, "wfst", options, 8.0, several=several, own=own)
