"""NeMo transducers: small random ones, the shipped checkpoints, and NeMo's own searches over them."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import soundfile
import torch

from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.assets import ASSETS, sentencepiece_processor, speech

VOCAB, ENCODER, HIDDEN = 128, 24, 32
LM_FILE = ASSETS / "lm" / "tok3.arpa"
PHRASES = [line for line in (ASSETS / "phrases.txt").read_text().split("\n") if line][:20]
LM_WEIGHT, BOOSTING_WEIGHT = 0.4, 0.6
DURATIONS = [0, 1, 2, 3, 4]
# what is fused, pruning_mode, blank_lm_score_mode
FUSION_MODES = [
    ("nothing", "late", "lm_weighted_full"),
    *[
        (what, pruning, blank)
        for what in ("lm", "boosting", "both")
        for pruning in ("late", "early")
        for blank in ("no_score", "lm_weighted_full")
    ],
]


def random_nemo_model(*, durations=(), prediction="lstm", joint="rnnt", layers=1, seed=0, blank_bias=7.0):
    """(decoder, joint): the output layer is sharpened, and its bias makes the blank frequent."""
    from nemo.collections.asr.modules.hybrid_autoregressive_transducer import HATJoint
    from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint, StatelessTransducerDecoder

    class StatelessDecoder(StatelessTransducerDecoder):
        """With the method that NeMo's batched beams need and that its stateless decoder lacks."""

        def batch_aggregate_states_beam(self, src_states, batch_size, beam_size, indices):
            rows = indices + beam_size * torch.arange(batch_size)[:, None]
            return [part[rows.flatten()] for part in src_states]

    torch.manual_seed(seed)
    if prediction == "lstm":
        decoder = RNNTDecoder({"pred_hidden": HIDDEN, "pred_rnn_layers": layers}, vocab_size=VOCAB)
    else:
        decoder = StatelessDecoder(
            {"pred_hidden": HIDDEN, "context_size": 2}, vocab_size=VOCAB, normalization_mode="layer"
        )
    sizes = {
        "encoder_hidden": ENCODER, "pred_hidden": HIDDEN, "joint_hidden": HIDDEN, "activation": "relu",
    }  # fmt: skip
    network = {"rnnt": RNNTJoint, "hat": HATJoint}[joint](sizes, num_classes=VOCAB, num_extra_outputs=len(durations))
    with torch.no_grad():
        if prediction == "lstm":
            for value in decoder.prediction["dec_rnn"].parameters():
                value.mul_(3.0)
        network.joint_net[-1].weight.mul_(6.0)
        if joint == "rnnt":
            network.joint_net[-1].bias[VOCAB] += blank_bias
        else:
            network.blank_pred[-2].bias += 0.5
    return decoder.eval(), network.eval()


def random_encoder_output(frames, *, seed):
    return torch.randn(1, frames, ENCODER, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class FusionPair:
    """The same LM and boosting tree in NeMo's form and in ours."""

    nemo: dict[str, Any]
    ours: Fusion

    @classmethod
    def load(cls):
        from nemo.collections.asr.parts.context_biasing import BoostingTreeModelConfig, GPUBoostingTreeModel
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        sentencepiece = sentencepiece_processor()

        class Tokenizer:
            vocab_size = VOCAB

            def text_to_ids(self, text):
                return sentencepiece.encode(text)

        tree = BoostingTreeModelConfig(key_phrases_list=PHRASES, context_score=1.0, depth_scaling=2.0)
        nemo = {
            "lm": NGramGPULanguageModel.from_file(LM_FILE, vocab_size=VOCAB),
            "boosting": GPUBoostingTreeModel.from_config(tree, tokenizer=Tokenizer()),
        }
        boosting = build_boosting_tree(
            [Phrase(phrase) for phrase in PHRASES],
            Vocabulary.from_sentencepiece(sentencepiece),
            BoostingConfig(context_score=1.0, depth_scaling=2.0, refund="nemo"),
        )
        return cls(nemo, Fusion(load_ngram_lm(LM_FILE, VOCAB), LM_WEIGHT, boosting, BOOSTING_WEIGHT))

    def for_nemo(self, what):
        names = {"nothing": [], "lm": ["lm"], "boosting": ["boosting"], "both": ["lm", "boosting"]}[what]
        weights = {"lm": LM_WEIGHT, "boosting": BOOSTING_WEIGHT}
        return {
            "fusion_models": [self.nemo[name] for name in names] or None,
            "fusion_models_alpha": [weights[name] for name in names] or None,
        }

    def for_us(self, what):
        lm = self.ours.lm if what in ("lm", "both") else None
        return Fusion(lm, LM_WEIGHT, self.ours.boosting if what in ("boosting", "both") else None, BOOSTING_WEIGHT)


def is_nemo_2():
    import nemo

    return nemo.__version__.startswith("2.")


def nemo_beams(computer, encoder_output, lengths=None):
    """NeMo's `BatchedBeamHyps` of a batch; NeMo 3 returns the state of the search as well."""
    lengths = [encoder_output.shape[1]] if lengths is None else lengths
    with torch.no_grad():
        found = computer(encoder_output, torch.tensor(lengths))
    return found[0] if isinstance(found, tuple) else found


def nemo_n_best(computer, encoder_output, *, score_norm=True):
    """[(tokens, start frames, durations or None, score)] of different tokens. TDT beams of NeMo 2 have no times."""
    is_tdt = len(getattr(computer, "durations", None) or []) > 0
    has_times = not (is_tdt and is_nemo_2())
    hypotheses = nemo_beams(computer, encoder_output).to_nbest_hyps_list(score_norm=score_norm)[0].n_best_hypotheses
    distinct = {}
    for hypothesis in hypotheses:
        # NeMo's TDT search may list a text twice, if its ways reach differently far beyond the end
        distinct.setdefault(tuple(hypothesis.y_sequence.tolist()), hypothesis)
    return [
        (
            list(tokens),
            hypothesis.timestamp.tolist() if has_times else None,
            hypothesis.token_duration.tolist() if is_tdt and has_times else None,
            hypothesis.score,
        )
        for tokens, hypothesis in distinct.items()
    ]


@functools.cache
def checkpoint(kind):
    """((decoder, joint), durations, encoder outputs [1, T, D] of 3 utterances) of a shipped model."""
    from nemo.collections.asr.models import ASRModel

    model = ASRModel.restore_from(str(ASSETS / "models" / f"self_hybrid_{kind}.nemo"), map_location="cpu").eval()
    outputs = []
    for row in speech()[:3]:
        samples = torch.from_numpy(soundfile.read(row["audio_filepath"], dtype="float32")[0])[None]
        with torch.no_grad():
            encoded, _ = model(input_signal=samples, input_signal_length=torch.tensor([samples.shape[1]]))
        outputs.append(encoded.transpose(1, 2))
    durations = list(model.cfg.get("model_defaults", {}).get("tdt_durations", None) or [])
    return (model.decoder, model.joint), durations, outputs


def assert_equal_texts(expected, nbest):
    """Texts, times and scores; only the order of nearly equal scores may differ."""
    by_text = {tuple(path.tokens.tolist()): path for path in nbest}
    assert nbest.best.tokens.tolist() == expected[0][0]
    for tokens, starts, _, score in expected:
        path = by_text[tuple(tokens)]
        assert path.score == pytest.approx(score, abs=1e-3)
        assert starts is None or path.frames.tolist() == starts
