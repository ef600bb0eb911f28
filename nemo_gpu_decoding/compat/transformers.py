"""Decode models of Hugging Face transformers with the searches of this package.

    model = ParakeetForTDT.from_pretrained(name)
    vocabulary = tokenizer_vocabulary(processor.tokenizer, model.config.vocab_size - 1)
    decoder = ALSDPlusPlus(parakeet_networks(model), ALSDConfig(beam_size=8))
    results = decoder.decode(*parakeet_inputs(model, **processor([audio, other])))
    [vocabulary.text(nbest.best.tokens) for nbest in results]

`ParakeetForCTC` has the same inputs; its decoders are `FlexCTCBeam`, `CudaWFST` and `PagedBigLM`. The classes are
tested with transformers 5.24; earlier releases lack some of them. For wav2vec2 and other models of its CTC pipeline
see `pyctcdecode.py` and `provide_pyctcdecode`.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch
from torch import Tensor, nn

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.compat import alphabet, pyctcdecode
from nemo_gpu_decoding.extras import is_installed
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks
from nemo_gpu_decoding.vocabulary import Vocabulary


def parakeet_networks(model: Any) -> LSTMNetworks:
    """Return prediction network and joint of a `ParakeetForRNNT` or `ParakeetForTDT`; they share the model's weights.

    Raises:
        ValueError: the model is no transducer, or the blank is not the last token.
    """
    if not hasattr(model, "joint"):
        raise FieldError("model", type(model).__name__, "ParakeetForRNNT or ParakeetForTDT")
    decoder = model.decoder
    _check_blank("blank_token_id", model.config)
    joint = nn.Sequential(model.joint.activation, model.joint.head)
    durations = tuple(getattr(model.config, "durations", ()))
    return LSTMNetworks(
        decoder.embedding, decoder.lstm, model.encoder_projector, decoder.decoder_projector, joint, durations=durations
    )


def parakeet_inputs(model: Any, **inputs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the model's encoder and return the inputs of a decoder, and their lengths in frames.

    Args:
        model: `ParakeetForCTC`, `ParakeetForRNNT` or `ParakeetForTDT`, in evaluation mode.
        inputs: those of the model's processor: input_features [B, frames, features], attention_mask [B, frames].

    Returns:
        CTC: natural log-probs [B, T, V + 1]; transducers: encoder frames [B, T, D]. The lengths are [B] in frames of
        the encoder, or None without an attention_mask.

    Raises:
        ValueError: the blank of a CTC model is not the last token.
    """
    head = getattr(model, "ctc_head", None)
    if head is not None:
        _check_blank("pad_token_id", model.config)
    mask = inputs.get("attention_mask")
    if mask is not None:  # the first convolution reads frames of padding
        inputs["input_features"] = inputs["input_features"].masked_fill(mask[:, :, None] == 0, 0.0)
    with torch.inference_mode():
        encoded = model.encoder(**inputs)
        frames = encoded.last_hidden_state
        lengths = None if encoded.attention_mask is None else encoded.attention_mask.sum(1)
        if head is not None:  # a Conv1d, whose own `forward` takes other axes in some releases
            frames = nn.Conv1d.forward(head, frames.transpose(1, 2)).transpose(1, 2).float().log_softmax(-1)
        return frames, lengths


def tokenizer_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the first `size` tokens of a tokenizer as a vocabulary. `size` is V of a model whose blank is token V.

    Raises:
        ValueError: the tokenizer has fewer tokens.
    """
    pieces = tokenizer.convert_ids_to_tokens(range(size))
    if None in pieces:
        raise FieldError("size", size, f"at most the tokenizer's {pieces.index(None)} tokens")
    return Vocabulary.from_pieces(pieces, encode=partial(tokenizer.encode, add_special_tokens=False))


def provide_pyctcdecode() -> None:
    """Make `import pyctcdecode`, also inside transformers, import `compat.pyctcdecode` in this process.

    `Wav2Vec2ProcessorWithLM`, and the pipeline of a repository that has an LM, then use this package. You need neither
    pyctcdecode nor kenlm: where transformers checks for kenlm, it gets an empty module. Call this function before
    transformers is imported, because some versions look for the two packages during import.
    """
    for name, module in ("", pyctcdecode), (".constants", pyctcdecode), (".alphabet", alphabet):
        sys.modules[f"pyctcdecode{name}"] = module
    if not is_installed("kenlm"):
        sys.modules["kenlm"] = module_from_spec(ModuleSpec("kenlm", None))
    checks = sys.modules.get("transformers.utils.import_utils")
    for name in "is_pyctcdecode_available", "is_kenlm_available":
        forget = getattr(getattr(checks, name, None), "cache_clear", None)
        if forget is not None:
            forget()


def _check_blank(name: str, config: Any) -> None:
    blank = getattr(config, name)
    if blank != config.vocab_size - 1:
        raise FieldError(f"config.{name}", blank, f"the last of the model's tokens: {config.vocab_size - 1}")
