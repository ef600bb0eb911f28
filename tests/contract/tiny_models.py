"""Models with random weights for the entry points of `compat`: ONNX exports and classes of transformers."""

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from tests.contract.subject import VOCAB

FEATURES, WIDTH, HIDDEN = 8, 6, 20  # sizes of features, of encoder frames and of the LSTM
HEADER = '<ir_version: 8, opset_import: ["": 17]>\n'
ENCODER = f"""encoder (float[N,{FEATURES},T] audio_signal, int64[N] length)
    => (float outputs, int64[N] encoded_lengths) {{
  frames = Transpose<perm=[0,2,1]>(audio_signal)
  projected = MatMul(frames, features)
  outputs = Transpose<perm=[0,2,1]>(projected)
  encoded_lengths = Identity(length)
}}"""
DECODER = f"""decoder (int64[N,U] targets, int32[N] target_length, float[1,N,{HIDDEN}] h, float[1,N,{HIDDEN}] c)
    => (float outputs, int32[N] prednet_lengths, float[1,N,{HIDDEN}] next_h, float[1,N,{HIDDEN}] next_c) {{
  embedded = Gather(embedding, targets)
  steps = Transpose<perm=[1,0,2]>(embedded)
  hidden, next_h, next_c = LSTM<hidden_size={HIDDEN}>(steps, lstm_input, lstm_hidden, lstm_bias, , h, c)
  one_direction = Squeeze(hidden, one)
  outputs = Transpose<perm=[1,2,0]>(one_direction)
  prednet_lengths = Identity(target_length)
}}"""
JOINER = f"""joint (float[N,{WIDTH},T] encoder_outputs, float[N,{HIDDEN},U] decoder_outputs) => (float outputs) {{
  frames = Transpose<perm=[0,2,1]>(encoder_outputs)
  texts = Transpose<perm=[0,2,1]>(decoder_outputs)
  projected = MatMul(frames, joint_frames)
  predicted = MatMul(texts, joint_texts)
  rows = Unsqueeze(projected, two)
  columns = Unsqueeze(predicted, one)
  sum = Add(rows, columns)
  active = Relu(sum)
  products = MatMul(active, output)
  outputs = Add(products, bias)
}}"""
CTC = f"""ctc (float[N,{FEATURES},T] audio_signal, int64[N] length) => (float logprobs) {{
  frames = Transpose<perm=[0,2,1]>(audio_signal)
  logits = MatMul(frames, head)
  logprobs = LogSoftmax<axis=2>(logits)
}}"""


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def save_onnx(path: Path, text: str, weights: dict[str, np.ndarray]) -> None:
    """Write a model in ONNX's text format, with those of the weights that it reads."""
    import onnx
    from onnx import numpy_helper, parser

    model = parser.parse_model(HEADER + text)
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(weights[key], key) for key in sorted(used & set(weights)))
    onnx.save(model, str(path))


@lru_cache(maxsize=32)
def onnx_folder(
    durations: int = 0, *, scale: float = 1.0, bias: float = 0.0, blank: float = 0.0, is_int8: bool = False
) -> Path:
    """A transducer and a CTC model as sherpa-onnx has them; the options are those of `Transducer.networks_of`."""
    folder, rng = Path(mkdtemp()), np.random.default_rng(4)

    def weights_of(*shape: int, scale: float) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(np.float32)

    weights = {
        "features": weights_of(FEATURES, WIDTH, scale=0.6),
        "head": weights_of(FEATURES, VOCAB + 1, scale=1.0),
        "embedding": weights_of(VOCAB + 1, HIDDEN, scale=1.0),
        "lstm_input": weights_of(1, 4 * HIDDEN, HIDDEN, scale=0.3),
        "lstm_hidden": weights_of(1, 4 * HIDDEN, HIDDEN, scale=0.3),
        "lstm_bias": weights_of(1, 8 * HIDDEN, scale=0.1),
        "joint_frames": weights_of(WIDTH, HIDDEN, scale=0.5),
        "joint_texts": weights_of(HIDDEN, HIDDEN, scale=0.7),
        "output": np.float32(scale) * weights_of(HIDDEN, VOCAB + 1 + durations, scale=0.45),
        "bias": np.full(VOCAB + 1 + durations, bias, np.float32),
        "one": np.array([1]),
        "two": np.array([2]),
    }
    weights["bias"][VOCAB] += scale * 1.5 + blank
    for name, text in {"encoder": ENCODER, "decoder": DECODER, "joiner": JOINER, "model": CTC}.items():
        save_onnx(folder / f"{name}.onnx", text, weights)
    if is_int8:
        from onnxruntime.quantization import quantize_dynamic

        for name in ("decoder", "joiner"):
            quantize_dynamic(folder / f"{name}.onnx", folder / f"{name}.int8.onnx")
            (folder / f"{name}.onnx").unlink()
    tokens = [*map(chr, range(97, 97 + VOCAB)), "<blk>"]
    (folder / "tokens.txt").write_text("".join(f"{token} {i}\n" for i, token in enumerate(tokens)))
    return folder


@lru_cache(maxsize=4)
def parakeet(kind: str, **options: Any) -> Any:
    """A model of transformers; `kind`: ctc, rnnt or tdt."""
    import transformers

    blank = "pad_token_id" if kind == "ctc" else "blank_token_id"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        encoder = transformers.ParakeetEncoderConfig(
            hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_mel_bins=80,
            subsampling_conv_channels=8, conv_kernel_size=9,
        )  # fmt: skip
        if kind != "ctc":
            options = {"decoder_hidden_size": 16, "num_decoder_layers": 2, **options}
        config = {"vocab_size": VOCAB + 1, blank: VOCAB, "encoder_config": encoder, **options}
        config = getattr(transformers, f"Parakeet{kind.upper()}Config")(**config)
        model = getattr(transformers, f"ParakeetFor{kind.upper()}")(config).eval()
        with torch.no_grad():  # transformers' own values give frames and logits that are all nearly 0
            for name, weight in model.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(0, (4.0 if "head" in name else 1.0) * weight[0].numel() ** -0.5)
        return model
