"""LM, phrases and weights per utterance with NeMo's `transcribe`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel

    from nemo_gpu_decoding.fusion.boosting import Phrase
    from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer

Wanted = Request | Sequence["str | Phrase"] | None


@contextlib.contextmanager
def utterance_requests(
    model: ASRModel,
    requests: Sequence[Wanted],
    *,
    boosting_weight: float | None = None,
    lms: Sequence[str | None] | None = None,
) -> Iterator[None]:
    """Within this block, the model decodes its first utterance with the first request, and so on.

        with utterance_requests(model, [["Gdansk", "Castellano"], None, Request(lm_weight=0.3)]):
            texts = model.transcribe(files)

    Args:
        model: a NeMo model with a strategy of this package.
        requests: one per utterance, in the order of decoding: a list of phrases, which replaces the phrases
            of the decoding config ([]: no phrases); a `Request`; or None for the decoding config.
        boosting_weight: weight of the lists of phrases; None: the config's `boosting_tree_alpha`.
        lms: one per utterance, beside its phrases: the name of an LM in the config's `lm_pool`, "none" for no LM, or
            None for the LM of the request or the config.

    Raises:
        ValueError: the model has another strategy, a list of phrases has no weight, or the number of
            utterances differs from that of requests.
    """
    infer = infer_of(model)
    queue = deque(_as_request(infer, wanted, boosting_weight) for wanted in requests)
    if lms is not None:
        pairs = zip(queue, lms, strict=True)
        queue = deque(own if lm is None else replace(own or Request(), lm=lm) for own, lm in pairs)
    pending = _Pending(model, queue, total=len(queue))
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    # not in `finally`: an error inside the block is more informative than leftover requests
    if pending.queue:
        used = pending.total - len(pending.queue)
        raise ValueError(f"requests has {pending.total} entries, but {used} utterances were decoded")


def infer_of(model: ASRModel) -> FusedInfer:
    """The decoder of a model's current strategy; a ValueError if it is one of NeMo's."""
    from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer

    infer = getattr(_decoding(model), "decoding", None)
    if not isinstance(infer, FusedInfer):
        raise ValueError(
            f"the model decodes with strategy '{_decoding(model).cfg.strategy}', expected {' or '.join(STRATEGIES)} "
            "(see change_decoding_strategy)"
        )
    return infer


def next_requests(infer: Any, batch: int) -> list[Request | None] | None:
    """The requests of the next `batch` utterances of `infer`; None without requests."""
    pending = _pending.get()
    if pending is None or _decoding(pending.model).decoding is not infer:
        return None
    if len(pending.queue) < batch:
        done = pending.total - len(pending.queue)
        raise ValueError(f"requests has {pending.total} entries, but after {done} utterances {batch} more are decoded")
    return [pending.queue.popleft() for _ in range(batch)]


def biasing_request(infer: FusedInfer, biasing: Any) -> Request | None:
    """The phrases and LM of a stream, from NeMo's `BiasingRequestItemConfig` or a `StreamRequest`; None without any.

    Its options replace those of the decoding config's `boosting_tree`. Keys that NeMo lacks, such as
    `whole_words`, keep the values of the decoding config.

    Raises:
        ValueError: an option has no effect here, or the biasing model is compiled for NeMo's decoders.
    """
    if biasing is None or biasing.is_empty():
        return None
    lm = getattr(biasing, "lm", None)
    try:
        config = replace(infer.options.fusion.boosting, **vars(biasing.boosting_model_cfg))
    except FieldError as error:
        raise error.named(f"biasing_cfg.boosting_model_cfg.{error.field}") from None
    if config.is_empty:
        if lm is not None:
            return Request(lm=lm)
        raise ValueError(
            "biasing_cfg holds a model that is compiled for NeMo's decoders (multi_model_id, cache_key), expected "
            "phrases in boosting_model_cfg"
        )
    return Request(infer.boosting_of(config), float(biasing.boosting_model_alpha), lm=lm)


@dataclass
class _Pending:
    model: Any
    queue: deque[Request | None]
    total: int


# A context variable, so that the requests of threads are separate. It is not an attribute of the decoder,
# because `transcribe(timestamps=True)` creates a new decoder.
_pending: ContextVar[_Pending | None] = ContextVar("pending_requests", default=None)


def _decoding(model: Any) -> Any:
    """NeMo's decoding object of the head in use."""
    return model.ctc_decoding if getattr(model, "cur_decoder", None) == "ctc" else model.decoding


def _as_request(infer: FusedInfer, wanted: Wanted, boosting_weight: float | None) -> Request | None:
    if wanted is None or isinstance(wanted, Request):
        return wanted
    if isinstance(wanted, str):
        raise ValueError(f"requests holds {wanted!r}, expected a list of phrases, a Request or None")
    if not wanted:
        return Request(boosting_weight=0.0) if infer.options.fusion.has_phrases else None
    weight = infer.options.fusion.boosting_weight if boosting_weight is None else boosting_weight
    if weight == 0.0:
        raise ValueError(f"boosting_weight is 0, expected a number > 0 (or set {infer.section}.boosting_tree_alpha)")
    return Request(boosting=infer.boosting_tree_of(wanted, weight), boosting_weight=weight)
