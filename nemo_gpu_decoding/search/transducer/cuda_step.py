"""What a strategy launches in a step: its `expand` and its `merge`, with what they have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import Module, runtime
from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton
from nemo_gpu_decoding.search.transducer import launch_shape as shapes
from nemo_gpu_decoding.search.transducer.beam import Search
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace


@dataclass(frozen=True)
class StepInputs:
    """What the kernels of a strategy are launched on."""

    module: Module  # of `DeviceStep.load`
    logits: Tensor  # [B * K, V + 1 (+ D)], of a type in LOGIT_TYPES
    workspace: Workspace
    lm: DeviceAutomaton
    search: Search
    durations: Tensor  # [D] int32
    inverse_temperature: float


@dataclass(frozen=True)
class DeviceStep:
    """The kernels of a strategy.

    `expand_options` and `merge_options` are parameters that only this strategy's kernels have, in their
    order; those of `expand` are numpy scalars.
    """

    source: str  # relative to the package, "search/alsd_pp/kernel.cu"
    per_hypothesis: int  # M, extensions that a hypothesis may have in one step
    pooled: bool  # whether `merge` needs room for a pool
    expand_options: tuple[tuple[str, np.generic], ...]
    merge_options: tuple[tuple[str, int], ...]

    def __call__(self, inputs: StepInputs) -> None:
        """Launch both."""
        _launch_expand(self, inputs)
        _launch_merge(self, inputs)

    def load(self, logits: torch.dtype, device: torch.device) -> Module:
        """The kernels for logits of this type."""
        defines = {**shapes.DEFINES, "LOGIT": shapes.LOGIT_TYPES[logits]}
        return runtime().load(self.source, device, defines)


def _launch_expand(step: DeviceStep, inputs: StepInputs) -> None:
    work, search, logits = inputs.workspace, inputs.search, inputs.logits
    per_hypothesis = work.shape.per_hypothesis
    shape = shapes.expand_shape(per_hypothesis, search.vocab_size + 1)
    own = tuple((name, type(value)) for name, value in step.expand_options)
    inputs.module.launch(
        shapes.expand_signature(logits.dtype, own),
        grid=work.rows,
        block=shape.threads,
        shared_bytes=shape.shared_bytes,
        logits=logits,
        utterances=work.utterances,
        beams=work.beams,
        progress=work.progress,
        frame_rows=work.frame_rows,
        lm_states=inputs.lm.states,
        lm_arcs=inputs.lm.arcs,
        boosting_states=work.boosting.states,
        boosting_arcs=work.boosting.arcs,
        extensions=work.extensions,
        counts=work.counts,
        inverse_temperature=inputs.inverse_temperature,
        columns=logits.shape[1],
        beam_size=work.shape.beam_size,
        vocab_size=search.vocab_size,
        num_durations=search.num_durations,
        timed=search.timed,
        weighted_blank=search.weighted_blank,
        late=search.late,
        **dict(step.expand_options),
        per_hypothesis=per_hypothesis,
        max_items=shape.items,
        max_labels=shape.labels,
    )


def _launch_merge(step: DeviceStep, inputs: StepInputs) -> None:
    work, search = inputs.workspace, inputs.search
    beam_size, per_hypothesis = work.shape.beam_size, work.shape.per_hypothesis
    own = tuple(name for name, _ in step.merge_options)
    inputs.module.launch(
        shapes.merge_signature(own),
        grid=work.shape.utterances,
        block=shapes.MERGE_THREADS,
        shared_bytes=shapes.merge_bytes(beam_size, per_hypothesis, step.pooled),
        extensions=work.extensions,
        counts=work.counts,
        durations=inputs.durations,
        utterances=work.utterances,
        beams=work.beams,
        progress=work.progress,
        nodes=work.nodes,
        frame_rows=work.frame_rows,
        text_rows=work.text_rows,
        labels=work.labels,
        sources=work.sources,
        targets=work.targets,
        room=work.node_room,
        entries=work.shape.entries,
        beam_size=beam_size,
        vocab_size=search.vocab_size,
        num_durations=search.num_durations,
        alignments=search.alignments,
        **dict(step.merge_options),
        per_hypothesis=per_hypothesis,
    )
