"""What tests do with a model, the strategies as they see them, and word LMs to decode with."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.oracles.ngram import arpa_text

# what most tests run with, as `strategy_case` takes them: each strategy, RNN-T and TDT in turn
CASES = ["flexctc_beam", "alsd_pp-rnnt", "aes_pp-tdt", "cuda_wfst", "paged_biglm"]
# each strategy on each kind of model that it is for
EVERY_CASE = [
    "flexctc_beam", "alsd_pp-rnnt", "alsd_pp-tdt", "aes_pp-rnnt", "aes_pp-tdt",
    "cuda_wfst", "paged_biglm",
]  # fmt: skip
GREEDY = {"strategy": "greedy_batch"}
CONFIDENCE = {"preserve_frame_confidence": True, "preserve_token_confidence": True, "preserve_word_confidence": True}
CONFIDENCE_METHODS = [
    {"name": "max_prob", "alpha": 1.0},
    {"name": "max_prob", "alpha": 0.5},
    {"name": "entropy", "entropy_type": "tsallis", "alpha": 0.33, "entropy_norm": "exp"},
    {"name": "entropy", "entropy_type": "gibbs", "alpha": 1.0, "entropy_norm": "lin"},
    {"name": "entropy", "entropy_type": "renyi", "alpha": 0.5, "entropy_norm": "exp"},
]


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


def texts_of(model, audio, **kwargs):
    return texts(model.transcribe(audio, verbose=False, **kwargs))


def one_shot(infer, utterances) -> list[list[int]]:
    rows = [torch.cat(parts) for parts in utterances.values()]
    lengths = [len(row) for row in rows]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return [nbest.best.tokens.tolist() for nbest in infer.decoder().decode(batch, lengths)]


def write_manifest(path, utterances):
    path.write_text("".join(json.dumps(utterance) + "\n" for utterance in utterances))
    return str(path)


@dataclass(frozen=True)
class Case:
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
        return {"strategy": self.strategy, self.section: {**self.options, **options}, **(top or {})}

    def use(self, top=None, **options) -> None:
        self.model.change_decoding_strategy(self.cfg(top, **options), verbose=False)

    def decode(self, top=None, **options):
        return decoded(self.model, self.cfg(top, **options), self.inputs)

    def texts(self, audio, **kwargs):
        return texts(self.model.transcribe(audio, verbose=False, **kwargs))

    def phrases(self, *phrases):
        return {"boosting_tree": {"key_phrases_list": list(phrases)}, "boosting_tree_alpha": self.phrase_weight}

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
        more = {"maes_expansion_gamma": 8.0} if strategy == "aes_pp" else {}  # the models are sure of themselves
        model = request.getfixturevalue({"rnnt": "hybrid_model", "tdt": "tdt_model"}[kind])
        encode, utterances = (request.getfixturevalue(f) for f in ("encoded_by", "utterances"))
        return Case(
            strategy, model, encode(model, utterances), "beam", {"beam_size": 8}, 2.0,
            lm={"ngram_lm_model": str(assets / "lm" / "tok3.arpa"), "ngram_lm_alpha": 0.3},
            several={"return_best_hypothesis": False, "n_best": 3, "score_norm": False, **more},
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


def write_lower_orders(arpa, target, most):
    """An LM of the n-grams of an ARPA file with at most `most` words, with their weights."""
    sections = arpa.read_text().split("\n\n")
    counts = [line for line in sections[0].splitlines() if not line.startswith("ngram ")]
    counts += [line for line in sections[0].splitlines() if line.startswith("ngram ")][:most]
    kept = [section for section in sections[1:] if section[1:2].isdigit() and int(section[1]) <= most]
    kept = [_without_backoffs(section) if int(section[1]) == most else section for section in kept]
    target.write_text("\n\n".join(["\n".join(counts), *kept, "\\end\\\n"]))
    return target


def write_without_unknown(arpa, target):
    """The LM of an ARPA file of 1-grams without <unk>."""
    lines = [line for line in arpa.read_text().splitlines() if "<unk>" not in line]
    count = sum(line[:1] in "-0" for line in lines if line)
    target.write_text("\n".join(f"ngram 1={count}" if "ngram 1" in line else line for line in lines))
    return target


def _without_backoffs(section):
    return "\n".join("\t".join(line.split("\t")[:2]) for line in section.splitlines())


LETTERS = [*"abcdefghijklmnopqrstuvwxyz", " "]


def write_arpa(path, words, pairs=(), unknown=True):
    """A word LM of equally likely words, with some likely pairs; returns its path as text."""
    one = -1.0
    table = {("<s>",): (-99.0, -0.3), ("</s>",): (one, 0.0)} | {(w,): (one, -0.3) for w in words}
    if unknown:
        table[("<unk>",)] = (-3.0, 0.0)
    path.write_text(arpa_text(table | dict.fromkeys(pairs, (-0.2, 0.0))))
    return str(path)


def spoken(columns, num_columns, blank, likely=0.8):
    """Log-probs [1, T, num_columns] in which each token lasts a frame, followed by a blank."""
    frames = [column for token in columns for column in (token, blank)]
    probs = np.full((len(frames), num_columns), (1 - likely) / (num_columns - 1))
    probs[np.arange(len(frames)), frames] = likely
    return torch.from_numpy(np.log(probs)).float()[None]
