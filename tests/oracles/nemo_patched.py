"""NeMo's `maes_batch` without the faults that change its results. The NeMo that gets timed keeps them."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# After an expansion slot k holds another hypothesis than before, but the mask of those that may be
# expanded further stays as it was: a hypothesis can leave a frame without a blank, and its score is then
# too good. Mended, every frame ends with a blank.
MASK = (
    "to_update = torch.logical_and(to_update, last_labels_wb != self._blank_index)",
    "to_update = torch.logical_and(to_update.gather(1, hyp_indices), last_labels_wb != self._blank_index)",
)
# With early pruning and lm_weighted_full the joint's log-probability is added twice.
TWICE = (
    (
        "total_logps + label_logps * (1 + self.ngram_lm_alpha),",
        "batched_hyps.scores.unsqueeze(-1) + label_logps * (1 + self.ngram_lm_alpha),",
    ),
    (
        "total_logps\n                    + label_logps\n",
        "batched_hyps.scores.unsqueeze(-1)\n                    + label_logps\n",
    ),
)
FAULTS = {"batched_modified_adaptive_expansion_search_torch": (MASK,), "topk_lm": TWICE}


def patched_class(kind: type) -> type:
    """NeMo's `ModifiedAESBatchedRNNTComputer` with the faults mended in the source of its methods.

    Raises:
        RuntimeError: this NeMo has other code in these places.
    """
    methods: dict[str, Any] = {}
    for name, changes in FAULTS.items():
        source = inspect.getsource(getattr(kind, name))
        for fault, mended_code in changes:
            if source.count(fault) != 1:
                raise RuntimeError(
                    f"NeMo's {name} has changed: look whether it is right now, and compare without mending it then"
                )
            source = source.replace(fault, mended_code)
        scope: dict[str, Any] = {}
        exec(textwrap.dedent(source), vars(inspect.getmodule(kind)), scope)
        methods[name] = scope[name]
    return type(f"Mended{kind.__name__}", (kind,), methods)


def computer_of(infer: Any) -> Any:
    """What searches for a `BeamBatchedRNNTInfer`, whose name for it is private in NeMo 2."""
    return infer.decoding_computer if hasattr(infer, "decoding_computer") else infer._decoding_computer


@contextmanager
def patched(infer: Any) -> Iterator[None]:
    """Inside the block the `BeamBatchedRNNTInfer` with `maes_batch` is without the faults."""
    computer = computer_of(infer)
    kind = type(computer)
    computer.__class__ = patched_class(kind)
    try:
        yield
    finally:
        computer.__class__ = kind
