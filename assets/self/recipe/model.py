"""The recogniser: one small FastConformer encoder with a CTC, an RNN-T and a TDT head.

`build` makes NeMo models from a plain dictionary, `export` writes trained ones as .nemo files.
The kind `streaming` is cache-aware: no layer looks beyond the end of its chunk, features are not
normalised over the utterance, and the encoder carries caches from chunk to chunk.
"""

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import torch
from nemo.collections.asr.models import ASRModel, EncDecCTCModelBPE, EncDecHybridRNNTCTCBPEModel
from omegaconf import OmegaConf, open_dict
from speech import SAMPLE_RATE

MEL_BANDS = 80
FRAMES_PER_SECOND = 100
SUBSAMPLING = 8  # encoder frames are 80 ms
DURATIONS = [0, 1, 2, 3, 4]  # frames that a TDT token may last
TDT_SIGMA = 0.02
STREAMING_CONTEXT = [70, 6]  # frames that attention sees before a chunk, and beyond the first frame of one
# Log-mel features that are not normalised are about this far from 0 (in such speech).
FEATURE_MEAN, FEATURE_DEVIATION = -9.0, 3.5

Config = dict[str, Any]


class Shape(NamedTuple):
    """Size and sort of the encoder."""

    layers: int
    width: int
    streaming: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """The models that have this encoder."""
        return ("streaming",) if self.streaming else ("ctc", "hybrid_rnnt", "hybrid_tdt")


def module(name: str, **settings: Any) -> Config:
    """Configuration of one of NeMo's speech modules."""
    return {"_target_": f"nemo.collections.asr.modules.{name}", **settings}


def data_set(shuffle: bool) -> Config:
    """Of no speech yet: NeMo's scripts expect the section."""
    return {
        "manifest_filepath": None,
        "sample_rate": SAMPLE_RATE,
        "batch_size": 16,
        "shuffle": shuffle,
        "use_start_end_token": False,
        "defer_setup": True,
    }


def front_end(shape: Shape) -> Config:
    """Log-mel features, SpecAugment and what `transcribe` expects to find."""
    mask = {"mask_value": FEATURE_MEAN} if shape.streaming else {}
    return {
        "sample_rate": SAMPLE_RATE,
        "preprocessor": module(
            "AudioToMelSpectrogramPreprocessor",
            sample_rate=SAMPLE_RATE,
            normalize="NA" if shape.streaming else "per_feature",
            window_size=0.025,
            window_stride=1 / FRAMES_PER_SECOND,
            window="hann",
            features=MEL_BANDS,
            n_fft=512,
            dither=1e-5,
            pad_to=0,
        ),
        "spec_augment": module(
            "SpectrogramAugmentation", freq_masks=2, freq_width=15, time_masks=5, time_width=0.05, **mask
        ),
        "train_ds": data_set(shuffle=True),
        "validation_ds": data_set(shuffle=False),
        "optim": {"name": "adamw", "lr": 1e-3},
    }


def encoder(shape: Shape) -> Config:
    """FastConformer: eight-fold subsampling, relative positions, full attention or that of a stream."""
    context: Config = {"att_context_size": [-1, -1], "conv_norm_type": "batch_norm"}
    if shape.streaming:
        context = {
            "att_context_size": STREAMING_CONTEXT,
            "att_context_style": "chunked_limited",
            "causal_downsampling": True,
            "conv_context_size": "causal",
            "conv_norm_type": "layer_norm",
        }
    return module(
        "ConformerEncoder",
        feat_in=MEL_BANDS,
        feat_out=-1,
        n_layers=shape.layers,
        d_model=shape.width,
        subsampling="dw_striding",
        subsampling_factor=SUBSAMPLING,
        subsampling_conv_channels=32,
        ff_expansion_factor=2,
        self_attention_model="rel_pos",
        n_heads=4,
        xscaling=True,
        untie_biases=True,
        pos_emb_max_len=5000,
        conv_kernel_size=9,
        dropout=0.05,
        dropout_pre_encoder=0.05,
        dropout_emb=0.0,
        dropout_att=0.0,
        **context,
    )


def ctc_decoder(width: int) -> Config:
    """One linear layer; NeMo fills in the vocabulary from the tokenizer."""
    return module("ConvASRDecoder", feat_in=width, num_classes=-1, vocabulary=[])


def transducer(width: int, tdt: bool) -> Config:
    """Prediction and joint network, loss and greedy decoding of an RNN-T or TDT head."""
    config: Config = {
        "model_defaults": {"enc_hidden": width, "pred_hidden": width, "joint_hidden": width},
        "decoder": module(
            "RNNTDecoder",
            normalization_mode=None,
            random_state_sampling=False,
            blank_as_pad=True,
            prednet={"pred_hidden": width, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.1},
        ),
        "joint": module(
            "RNNTJoint",
            log_softmax=None,
            preserve_memory=False,
            fuse_loss_wer=False,
            fused_batch_size=None,
            jointnet={
                "joint_hidden": width,
                "encoder_hidden": width,
                "pred_hidden": width,
                "activation": "relu",
                "dropout": 0.0,
            },
        ),
        "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.0}},
        "decoding": {
            "strategy": "greedy_batch",
            "greedy": {"max_symbols": 10},
            "beam": {"beam_size": 4, "return_best_hypothesis": True, "score_norm": True},
        },
    }
    if tdt:
        config["model_defaults"]["tdt_durations"] = DURATIONS
        config["model_defaults"]["num_tdt_durations"] = len(DURATIONS)
        config["joint"]["num_extra_outputs"] = len(DURATIONS)
        config["decoding"] |= {"model_type": "tdt", "durations": DURATIONS}
        tdt_loss = {"fastemit_lambda": 0.0, "durations": DURATIONS, "sigma": TDT_SIGMA}
        config["loss"] = {"loss_name": "tdt", "tdt_kwargs": tdt_loss | {"omega": 0.1}}
        config["compute_eval_loss"] = False  # NeMo computes it on GPUs alone
    return config


def build(kind: str, tokenizer: Path, shape: Shape) -> ASRModel:
    """An untrained model of one of the shape's kinds."""
    config = front_end(shape)
    config["tokenizer"] = {"dir": str(tokenizer), "type": "bpe"}
    config["encoder"] = encoder(shape)
    if kind == "ctc":
        config["decoder"] = ctc_decoder(shape.width)
        config["decoding"] = {"strategy": "greedy_batch"}
        return EncDecCTCModelBPE(cfg=OmegaConf.create(config))
    config |= transducer(shape.width, tdt=kind == "hybrid_tdt")
    config["aux_ctc"] = {
        "ctc_loss_weight": 0.3,
        "decoder": ctc_decoder(shape.width),
        "decoding": {"strategy": "greedy_batch"},
    }
    model = EncDecHybridRNNTCTCBPEModel(cfg=OmegaConf.create(config))
    if shape.streaming:
        expect_raw_features(model.encoder.pre_encode.conv[0])
    return model


@torch.no_grad()
def expect_raw_features(convolution: torch.nn.Conv2d) -> None:
    """Start the first layer as if its input were normalised; left to itself, it is slow to learn that."""
    convolution.weight /= FEATURE_DEVIATION
    convolution.bias -= FEATURE_MEAN * convolution.weight.sum(dim=(1, 2, 3))


def build_sharing_encoder(tokenizer: Path, shape: Shape) -> dict[str, EncDecHybridRNNTCTCBPEModel]:
    """All hybrid models of a shape, with one encoder and one CTC head between them."""
    models = {kind: build(kind, tokenizer, shape) for kind in shape.kinds if kind != "ctc"}
    first, *others = models.values()
    for other in others:
        other.encoder = first.encoder
        other.ctc_decoder = first.ctc_decoder
    return models


def export(weights: Path, tokenizer: Path, shape: Shape, folder: Path, seconds: list[float]) -> None:
    """Write the trained models as .nemo files with 16-bit weights and no paths inside.

    `restore_from` turns the weights back into 32 bits. The config has the least and the greatest of `seconds`, lengths
    of the utterances of the training: `transcribe` cuts long recordings into segments of such lengths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(weights, map_location="cpu")
    for kind in shape.kinds:
        model = build(kind, tokenizer, shape)
        if kind == "ctc":
            model.encoder.load_state_dict(part(state["hybrid_rnnt"], "encoder"))
            model.decoder.load_state_dict(part(state["hybrid_rnnt"], "ctc_decoder"))
        else:
            model.load_state_dict(state[kind])
        for name, child in model.named_children():
            if name in ("encoder", "decoder", "joint", "ctc_decoder"):
                child.half()
        with open_dict(model.cfg):
            model.cfg.tokenizer.dir = None
            model.cfg.train_ds.update(min_duration=round(min(seconds), 1), max_duration=round(max(seconds), 1))
        path = folder / f"self_{kind}.nemo"
        model.save_to(str(path))
        path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))  # NeMo opens archives of both sorts


def part(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The weights of one sub-module, without its name in front."""
    return {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
