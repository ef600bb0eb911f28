"""Our checkpoints as models of Hugging Face transformers, whose FastConformer and transducer have the same layers."""

from collections import OrderedDict

RENAMED = {  # parts of NeMo's names -> those of transformers
    "encoder.pre_encode.conv.": "encoder.subsampling.layers.",
    "encoder.pre_encode.out.": "encoder.subsampling.linear.",
    "linear_pos.": "relative_k_proj.", "linear_q.": "q_proj.", "linear_k.": "k_proj.", "linear_v.": "v_proj.",
    "linear_out.": "o_proj.", "pos_bias_": "bias_", "conv.batch_norm.": "conv.norm.",
    "decoder.prediction.embed.": "decoder.embedding.", "decoder.prediction.dec_rnn.lstm.": "decoder.lstm.",
    "joint.enc.": "encoder_projector.", "joint.pred.": "decoder.decoder_projector.",
    "joint.joint_net.1.": "joint.head.", "ctc_decoder.decoder_layers.0.": "ctc_head.",
}  # fmt: skip


def converted(model, kind):
    """A hybrid model of NeMo as ParakeetForCTC, ParakeetForRNNT or ParakeetForTDT; `kind`: ctc, rnnt or tdt."""
    import transformers

    own = model.cfg.encoder
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=own.d_model, num_hidden_layers=own.n_layers, num_attention_heads=own.n_heads,
        intermediate_size=own.d_model * own.ff_expansion_factor, conv_kernel_size=own.conv_kernel_size,
        subsampling_factor=own.subsampling_factor, subsampling_conv_channels=own.subsampling_conv_channels,
        num_mel_bins=own.feat_in, scale_input=own.xscaling,
    )  # fmt: skip
    labels = len(model.joint.vocabulary) + 1
    if kind == "ctc":
        config = transformers.ParakeetCTCConfig(
            vocab_size=labels, pad_token_id=labels - 1, encoder_config=encoder, inputs_to_logits_ratio=1280
        )
    else:
        config = getattr(transformers, f"Parakeet{kind.upper()}Config")(
            vocab_size=labels, blank_token_id=labels - 1, pad_token_id=labels - 1, encoder_config=encoder,
            decoder_hidden_size=model.cfg.joint.jointnet.joint_hidden,
            num_decoder_layers=model.cfg.decoder.prednet.pred_rnn_layers,
        )  # fmt: skip
    result = getattr(transformers, f"ParakeetFor{kind.upper()}")(config).eval()
    unused = ("decoder.", "joint.") if kind == "ctc" else ("ctc_decoder.",)
    weights = OrderedDict()
    for name, value in model.state_dict().items():
        if not name.startswith(("preprocessor.", *unused)):
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            weights[name] = value
    result.load_state_dict(weights, strict=True)
    return result


def processor_of(model):
    """Feature extractor and tokenizer of a NeMo model as a ParakeetProcessor; the blank is <pad>."""
    import tokenizers
    import transformers

    pieces = list(model.joint.vocabulary)
    ids = {piece: i for i, piece in enumerate(pieces)}
    splits = ((piece[:i], piece[i:]) for piece in pieces[1:] for i in range(1, len(piece)))
    merges = [(left, right) for left, right in splits if left in ids and right in ids]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    own = transformers.ParakeetTokenizer(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    return transformers.ParakeetProcessor(transformers.ParakeetFeatureExtractor(), own)
