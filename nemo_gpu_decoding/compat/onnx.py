"""Run NeMo models that sherpa-onnx, onnx-asr or NeMo's `export` have exported to ONNX.

    networks = OnnxTransducer("parakeet-tdt-0.6b-v2")
    encoded = networks.encode([log_mel(samples)])  # samples: [n] at 16 kHz
    best = ALSDPlusPlus(networks, ALSDConfig(beam_size=4)).decode(encoded)[0].best
    networks.vocabulary.text(best.tokens)

A folder holds the files of a model. File names may have a prefix, and a suffix such as ".int8" for quantization:

    encoder.onnx, decoder.onnx, joiner.onnx, tokens.txt           transducer of sherpa-onnx
    encoder-model.onnx, decoder_joint-model.onnx, vocab.txt       transducer of NeMo and onnx-asr
    model.onnx, and tokens.txt or vocab.txt                       CTC model of either

onnxruntime runs the networks. The search keeps its states in torch tensors.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.compat.onnx_graph import Graph
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.search.transducer.networks import State, checked_durations, whole_blocks
from nemo_gpu_decoding.vocabulary import Vocabulary

TOKEN_FILES = "tokens.txt", "vocab.txt"
BLANK = "<blk>"
TYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}


class OnnxTransducer:
    """An exported RNN-T or TDT model; it has the interface `TransducerNetworks`, which transducer searches take.

    Args:
        folder: folder with the files of the model.
        durations: of a TDT model, in frames; None means 0, 1, 2, ... for the outputs of the joint beyond the labels.
        quantization: the end of the files' names, such as "int8"; None: files without such an end, or the only files.
        providers: onnxruntime's providers; None means the CPU.

    Raises:
        FileNotFoundError: a part is missing.
        ValueError: there are several files for a part, or a part has another form.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        durations: Sequence[int] | None = None,
        quantization: str | None = None,
        providers: Sequence[str] | None = None,
    ) -> None:
        require("onnx")
        self._arguments = folder, durations, quantization, providers
        files = _Files(Path(folder), quantization)
        self.vocabulary = files.vocabulary()
        self.vocab_size = len(self.vocabulary)
        self._encoder = _Session(str(files.path("encoder")), providers)
        both = files.path("decoder_joint", is_required=False)
        graph = Graph.of(files.path("decoder"), files.path("join(?:er|t)")) if both is None else Graph.of(both)
        states, (logits, *after) = graph.texts[2:], graph.outputs
        is_alone = graph.is_dynamic
        self._frames = _Rows(graph.part([graph.frames], graph.meeting[:1]), providers, is_alone)
        self._texts = _Rows(graph.part(graph.texts, [graph.meeting[1], *after]), providers, is_alone, len(states))
        self._joint = _Rows(graph.part(graph.meeting, [logits]), providers, is_alone)
        self.encoder_size = graph.sizes(graph.frames)[1]
        self._zeros = tuple(torch.zeros(1, layers, size) for layers, _, size in map(graph.sizes, states))
        first, _ = self.start()
        columns = self.join(self.project_encoder(torch.zeros(1, self.encoder_size)), first).shape[1]
        self.durations = checked_durations(range(columns - self.vocab_size - 1) if durations is None else durations)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def encode(self, features: Sequence[Any]) -> list[Tensor]:
        """Return the encoder's output [T, D] of each utterance.

        Args:
            features: [features, frames] of each utterance, as `log_mel` computes them; NumPy or torch.
        """
        found = []
        for one in features:
            outputs, lengths = self._encoder(*_utterance(one))
            found.append(torch.from_numpy(outputs[0, :, : int(lengths[0])]).T)
        return found

    def evaluation(self) -> AbstractContextManager[None]:
        return nullcontext()

    def project_encoder(self, frames: Tensor) -> Tensor:
        return self._frames(frames.float()[:, :, None])[0]

    def start(self) -> tuple[Tensor, State]:
        return self.predict(torch.tensor([self.vocab_size]), self._zeros)

    def predict(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        prediction, *after = self._texts(labels[:, None], torch.ones_like(labels), *state)
        return prediction, tuple(after)

    def join(self, frames: Tensor, predictions: Tensor) -> Tensor:
        return self._joint(frames[:, None, None], predictions[:, None, None])[0]


class OnnxCTC:
    """An exported CTC model; the blank is the last column.

    Args:
        folder, quantization, providers: as for `OnnxTransducer`.

    Raises:
        FileNotFoundError, ValueError: as by `OnnxTransducer`.
    """

    def __init__(
        self, folder: str | PathLike[str], quantization: str | None = None, providers: Sequence[str] | None = None
    ) -> None:
        require("onnx")
        files = _Files(Path(folder), quantization)
        self.vocabulary = files.vocabulary()
        self._model = _Session(str(files.path("model")), providers)

    def log_probs(self, features: Sequence[Any]) -> list[Tensor]:
        """Return log-probs [T, V + 1] of each utterance; `features` as for `OnnxTransducer.encode`."""
        return [torch.from_numpy(self._model(*_utterance(one))[0][0]) for one in features]


class _Files:
    """The folder of an exported model, with the names of its files."""

    def __init__(self, folder: Path, quantization: str | None) -> None:
        self.folder, self.quantization = folder, quantization
        self.names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def path(self, part: str, *, is_required: bool = True) -> Any:
        """Return the path of the encoder, decoder or another network, or None if an optional one is missing."""
        pattern = re.compile(rf"(?:.*[_-])?{part}(?:-model)?(?:[._-](int8|uint8|fp16|\w*quant\w*))?\.onnx")
        ends = {name: match[1] for name in self.names if (match := pattern.fullmatch(name))}
        found = [name for name, end in ends.items() if end == self.quantization]
        if not found and self.quantization is None:
            found = list(ends)
        if len(found) == 1:
            return self.folder / found[0]
        if found:
            raise ValueError(f"{self.folder} has {', '.join(found)}, expected one; name one with quantization=...")
        if not is_required:
            return None
        end = "" if self.quantization is None else f".{self.quantization}"
        raise FileNotFoundError(f"{self.folder} has no file such as {part}{end}.onnx; its files: {self.names}")

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary in the token file; its last line is the blank."""
        for name in TOKEN_FILES:
            matching = [found for found in self.names if found.endswith(name)]
            if matching:
                lines = (self.folder / matching[0]).read_text(encoding="utf-8").splitlines()
                pieces = [line.rpartition(" ")[0] for line in lines if line]
                if pieces[-1:] != [BLANK]:
                    raise ValueError(f"{matching[0]} ends with {lines[-1:]}, expected the blank: '{BLANK} NUMBER'")
                return Vocabulary.from_pieces(pieces[:-1])
        raise FileNotFoundError(f"{self.folder} has no {' or '.join(TOKEN_FILES)}; its files: {self.names}")


class _Session:
    """A network in onnxruntime; a call takes the inputs in order and returns the outputs."""

    def __init__(self, model: str | bytes, providers: Sequence[str] | None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=providers or ["CPUExecutionProvider"])
        self._inputs = [(given.name, TYPES.get(given.type)) for given in self._session.get_inputs()]
        if other := [given.name for given in self._session.get_inputs() if given.type not in TYPES]:
            raise ValueError(f"the type of {other[0]} is none of {', '.join(TYPES)}")

    def __call__(self, *values: Tensor) -> list[np.ndarray]:
        fed = {name: x.numpy().astype(kind, copy=False) for (name, kind), x in zip(self._inputs, values, strict=True)}
        return self._session.run(None, fed)


class _Rows(_Session):
    """A network of a transducer; a call takes one row of each input per hypothesis.

    Args:
        model, providers: as for `_Session`.
        is_alone: whether to compute one row per call, because dynamic quantization depends on all rows.
        states: number of LSTM states, which are the last inputs and outputs, [layers, N, columns].
    """

    def __init__(self, model: bytes, providers: Sequence[str] | None, is_alone: bool, states: int = 0) -> None:
        super().__init__(model, providers)
        self.is_alone, self.states = is_alone, states

    def __call__(self, *values: Tensor) -> Any:
        """Compute N hypotheses; return the outputs [N, columns] and the LSTM states [N, layers, columns]."""
        count = len(values[0])
        if self.is_alone and count > 1:
            each = [self(*(value[i : i + 1] for value in values)) for i in range(count)]
            return [torch.cat(parts) for parts in zip(*each, strict=True)]
        rows = list(values) if self.is_alone else [whole_blocks(value) for value in values]
        first = len(rows) - self.states
        found = super().__call__(*rows[:first], *(state.transpose(0, 1) for state in rows[first:]))
        split = len(found) - self.states
        outputs = [torch.from_numpy(output).flatten(1)[:count] for output in found[:split]]
        return outputs + [torch.from_numpy(state).transpose(0, 1)[:count] for state in found[split:]]


def _utterance(features: Any) -> tuple[Tensor, Tensor]:
    """Return the features of one utterance as a batch [1, features, frames], and the number of frames [1]."""
    values = torch.as_tensor(features)
    if values.ndim != 2:
        raise ValueError(f"features has shape {tuple(values.shape)}, expected [features, frames] of each utterance")
    return values[None], torch.tensor([values.shape[1]])
