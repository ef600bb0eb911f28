"""Join the prediction network and joint of an exported transducer into one ONNX graph, and cut out subgraphs.

An exported joint projects a frame again for every hypothesis, and some decoders take one hypothesis only. So the graph
is cut where values that depend on frames meet values that depend on texts. Subgraphs take any batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class Graph:
    """The ONNX graph of a prediction network ("decoder") and a joint.

    Args:
        model: an `onnx.ModelProto`.
        frames: the input that is an encoder frame; all other inputs are labels, lengths and states.
        outputs: the logits, and the states after a label.
    """

    def __init__(self, model: Any, frames: str, outputs: Sequence[str]) -> None:
        self._model, self.frames, self.outputs = model, frames, list(outputs)
        self.texts = [given.name for given in model.graph.input if given.name != frames]

    @classmethod
    def of(cls, decoder: Path, joint: Path | None = None) -> Graph:
        """Read decoder and joint from one or two ONNX files; the decoder's outputs are prediction, lengths, states."""
        import onnx
        from onnx import compose

        model = onnx.load(str(decoder))
        names = [output.name for output in model.graph.output]
        if joint is None:
            return cls(model, model.graph.input[0].name, [names[0], *names[2:]])
        other = onnx.load(str(joint))
        frames, prediction = (given.name for given in other.graph.input)
        del model.metadata_props[:], other.metadata_props[:]
        logits = f"joint_{other.graph.output[0].name}"
        whole = compose.merge_models(model, other, [(names[0], prediction)], prefix1="text_", prefix2="joint_")
        return cls(whole, f"joint_{frames}", [logits, *(f"text_{name}" for name in names[2:])])

    @property
    def is_dynamic(self) -> bool:
        """Return whether the graph has dynamic quantization, whose ranges are computed from the inputs."""
        return any(node.op_type.startswith("DynamicQuantize") for node in self._model.graph.node)

    def sizes(self, name: str) -> list[int]:
        """Return the shape of an input, where 0 means any size."""
        (given,) = (given for given in self._model.graph.input if given.name == name)
        return [axis.dim_value for axis in given.type.tensor_type.shape.dim]

    @cached_property
    def meeting(self) -> list[str]:
        """Return the names of two values that enter one node: one depends on frames only, the other on texts only.

        Raises:
            ValueError: several values that depend on frames only, or on texts only, enter such nodes.
        """
        depends = {name: {"texts"} for name in self.texts} | {self.frames: {"frames"}}
        both: dict[str, set[str]] = {"frames": set(), "texts": set()}
        for node in self._model.graph.node:
            on = set().union(*(depends.get(name, set()) for name in node.input))
            depends.update(dict.fromkeys(node.output, on))
            if len(on) == 2:
                for name in node.input:
                    if len(own := depends.get(name, set())) == 1:
                        both[next(iter(own))].add(name)
        if any(len(names) != 1 for names in both.values()):
            raise ValueError(f"in the joint {both} meet, expected one value that depends on frames and one on texts")
        return [name for names in both.values() for name in names]

    def part(self, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
        """Return the subgraph from `inputs` to `outputs` as a serialized ONNX model, whose inputs have any shape."""
        import onnx
        from onnx import helper

        needed, nodes = set(outputs), []
        for node in reversed(self._model.graph.node):
            if (needed - set(inputs)) & set(node.output):
                nodes.append(node)
                needed |= set(node.input)
        types = {given.name: given.type.tensor_type.elem_type for given in self._model.graph.input}

        def values(names: Sequence[str]) -> list[Any]:
            kinds = [types.get(name, onnx.TensorProto.FLOAT) for name in names]
            return [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)]

        weights = [weight for weight in self._model.graph.initializer if weight.name in needed]
        graph = helper.make_graph(nodes[::-1], "part", values(inputs), values(outputs), weights)
        return helper.make_model(
            graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version
        ).SerializeToString()
