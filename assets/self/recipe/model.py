"""The recogniser: one small FastConformer encoder with a CTC, an RNN-T and a TDT head.

`build` makes NeMo models from a plain dictionary, `export` writes trained ones as .nemo files.
"""

from pathlib import Path
from typing import Any

import torch
from nemo.collections.asr.models import ASRModel, EncDecCTCModelBPE, EncDecHybridRNNTCTCBPEModel
from omegaconf import OmegaConf, open_dict
from speech import SAMPLE_RATE

MEL_BANDS = 80
FRAMES_PER_SECOND = 100
SUBSAMPLING = 8  # encoder frames are 80 ms
DURATIONS = [0, 1, 2, 3, 4]  # frames that a TDT token may last
TDT_SIGMA = 0.02
KINDS = ("ctc", "hybrid_rnnt", "hybrid_tdt")

Config = dict[str, Any]


def module(name: str, **settings: Any) -> Config:
    """Configuration of one of NeMo's speech modules."""
    return {"_target_": f"nemo.collections.asr.modules.{name}", **settings}


def front_end() -> Config:
    """Log-mel features, SpecAugment and what `transcribe` expects to find."""
    return {
        "sample_rate": SAMPLE_RATE,
        "preprocessor": module(
            "AudioToMelSpectrogramPreprocessor",
            sample_rate=SAMPLE_RATE,
            normalize="per_feature",
            window_size=0.025,
            window_stride=1 / FRAMES_PER_SECOND,
            window="hann",
            features=MEL_BANDS,
            n_fft=512,
            dither=1e-5,
            pad_to=0,
        ),
        "spec_augment": module("SpectrogramAugmentation", freq_masks=2, freq_width=15, time_masks=5, time_width=0.05),
        "validation_ds": {
            "manifest_filepath": None,
            "sample_rate": SAMPLE_RATE,
            "batch_size": 16,
            "shuffle": False,
            "use_start_end_token": False,
            "defer_setup": True,
        },
        "optim": {"name": "adamw", "lr": 1e-3},
    }


def encoder(layers: int, width: int) -> Config:
    """FastConformer: eight-fold subsampling, relative positions, full attention."""
    return module(
        "ConformerEncoder",
        feat_in=MEL_BANDS,
        feat_out=-1,
        n_layers=layers,
        d_model=width,
        subsampling="dw_striding",
        subsampling_factor=SUBSAMPLING,
        subsampling_conv_channels=32,
        ff_expansion_factor=2,
        self_attention_model="rel_pos",
        n_heads=4,
        att_context_size=[-1, -1],
        xscaling=True,
        untie_biases=True,
        pos_emb_max_len=5000,
        conv_kernel_size=9,
        conv_norm_type="batch_norm",
        dropout=0.05,
        dropout_pre_encoder=0.05,
        dropout_emb=0.0,
        dropout_att=0.0,
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
    return config


def build(kind: str, tokenizer: Path, layers: int, width: int) -> ASRModel:
    """An untrained model of one of `KINDS`."""
    config = front_end()
    config["tokenizer"] = {"dir": str(tokenizer), "type": "bpe"}
    config["encoder"] = encoder(layers, width)
    if kind == "ctc":
        config["decoder"] = ctc_decoder(width)
        config["decoding"] = {"strategy": "greedy_batch"}
        return EncDecCTCModelBPE(cfg=OmegaConf.create(config))
    config |= transducer(width, tdt=kind == "hybrid_tdt")
    config["aux_ctc"] = {
        "ctc_loss_weight": 0.3,
        "decoder": ctc_decoder(width),
        "decoding": {"strategy": "greedy_batch"},
    }
    return EncDecHybridRNNTCTCBPEModel(cfg=OmegaConf.create(config))


def build_sharing_encoder(
    tokenizer: Path, layers: int, width: int
) -> tuple[EncDecHybridRNNTCTCBPEModel, EncDecHybridRNNTCTCBPEModel]:
    """An RNN-T and a TDT hybrid with one encoder and one CTC head between them."""
    rnnt = build("hybrid_rnnt", tokenizer, layers, width)
    tdt = build("hybrid_tdt", tokenizer, layers, width)
    tdt.encoder = rnnt.encoder
    tdt.ctc_decoder = rnnt.ctc_decoder
    return rnnt, tdt


def export(weights: Path, tokenizer: Path, layers: int, width: int, folder: Path) -> None:
    """Write the trained models as .nemo files with 16-bit weights and no paths inside.

    `restore_from` turns the weights back into 32 bits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(weights, map_location="cpu")
    for kind in KINDS:
        model = build(kind, tokenizer, layers, width)
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
        model.save_to(str(folder / f"self_{kind}.nemo"))


def part(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The weights of one sub-module, without its name in front."""
    return {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
