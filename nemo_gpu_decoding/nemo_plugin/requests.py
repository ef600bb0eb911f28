"""Set LM, phrases, language lock, grammar and weights for each utterance of a call of NeMo's `transcribe`."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.checks import FieldError, NothingLeftError, check_number, fields_named, having
from nemo_gpu_decoding.fusion.boosting import weight_of_tree
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.fusion.grammar import MOST_LETTERS
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel

    from nemo_gpu_decoding.fusion.boosting import Phrase
    from nemo_gpu_decoding.metrics import ConfidenceMap
    from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer
    from nemo_gpu_decoding.nemo_plugin.section import AllowedOptions

Wanted = Request | WrittenRequest | Sequence["str | Phrase"] | None
logger = logging.getLogger("nemo_gpu_decoding")
PHRASES = ("phrases", "biasing_request")  # keys of phrases; a request has one of them


@contextlib.contextmanager
def utterance_requests(
    model: ASRModel, requests: Sequence[Wanted], *, boosting_weight: float | None = None
) -> Iterator[None]:
    """Decode utterance i of the `with` block with requests[i].

        with utterance_requests(model, [["Gdansk", "Castellano"], None, Request(lm_weight=0.3)]):
            texts = model.transcribe(files)

    Args:
        model: a NeMo model with a strategy of this package.
        requests: one per utterance, in the order of decoding: a list of phrases instead of those of the decoding
            config ([]: none); a `Request`, such as `Request(lm="news")`; a `WrittenRequest`; or None for the config.
        boosting_weight: weight of the lists of phrases; None means the config's `boosting_tree_alpha`.

    Raises:
        ValueError: the model has another strategy; a list of phrases has no weight; the strategy does not support a
            written request; the numbers of utterances and requests differ.
    """
    infer = infer_of(model)
    queue = deque(_as_request(infer, wanted, boosting_weight) for wanted in requests)
    pending = _Pending(model, queue, total=len(queue))
    with having(_pending, pending):
        yield
    # not if the block fails: an error inside the block is more informative than leftover requests
    if pending.queue:
        used = pending.total - len(pending.queue)
        raise ValueError(f"requests has {pending.total} entries, but {used} utterances were decoded")


def infer_of(model: ASRModel, where: str = "") -> FusedInfer:
    """Return the decoder of a model's current strategy; raise a ValueError if the strategy is one of NeMo's."""
    from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer

    infer = getattr(_decoding(model), "decoding", None)
    getattr(infer, "options", None)  # raises the error of a model that was restored without its files
    if not isinstance(infer, FusedInfer):
        raise ValueError(
            f"{where}the model decodes with strategy '{_decoding(model).cfg.strategy}', expected "
            f"{' or '.join(STRATEGIES)} (see change_decoding_strategy)"
        )
    return infer


def confidence_map(infer: Any) -> ConfidenceMap | None:
    """Return the map from word confidence to probability that a decoder's options have, or None."""
    return getattr(getattr(infer, "options", None), "confidence_map", None)


def next_requests(infer: Any, batch: int) -> list[Request | None] | None:
    """Return the requests of the next `batch` utterances that `infer` decodes, or None outside of
    `utterance_requests`.
    """
    pending = _pending.get()
    if pending is None or _decoding(pending.model).decoding is not infer:
        return None
    if len(pending.queue) < batch:
        done = pending.total - len(pending.queue)
        raise ValueError(f"requests has {pending.total} entries, but after {done} utterances {batch} more are decoded")
    return [pending.queue.popleft() for _ in range(batch)]


def request_of(
    infer: FusedInfer, written: WrittenRequest, boosting_weight: float | None = None, most_letters: int = MOST_LETTERS
) -> Request:
    """Compile an utterance's written request: build tree, grammar and language lock, and check them.

    Args:
        boosting_weight: weight of its phrases; None means the config's `boosting_tree_alpha`.
        most_letters: maximum number of letters in its grammar.

    Raises:
        FieldError: the strategy has no such LM, cannot boost the phrases, or takes no lock or grammar.
    """
    from nemo_gpu_decoding.nemo_plugin.infer import load_allowed, load_grammar

    fusion, decoder = infer.options.fusion, infer.decoder()
    rules: dict[str, Any] = {}
    for key in written.given.keys() - {"phrases", "lm", "biasing_request"}:
        if decoder.why_unlocked:
            raise FieldError(key, written.shown[key], f"none: {decoder.why_unlocked}")
    if written.given.keys() & {"allowed_scripts", "allowed_tokens", "allowed_price"}:
        rules["allowed"] = load_allowed(_own_lock(fusion.allowed, written), infer.vocabulary(), "")
    if written.given.keys() & {"grammar", "grammar_price"}:
        source = fusion.grammar if written.grammar is None else written.grammar
        price = fusion.grammar_price if written.grammar_price is None else written.grammar_price
        if source is None:
            raise FieldError("grammar_price", price, "a grammar that it is for")
        rules["grammar"] = load_grammar(source, price, infer.vocabulary(), "", most_letters)
    elif fusion.grammar is not None and (given := [name for name in PHRASES if getattr(written, name)]):
        raise FieldError(given[0], written.shown[given[0]], "none: the decoder's grammar has all sentences")
    try:
        if written.biasing_request is not None:
            boosted = biasing_request(infer, _of_nemo(written))
        else:
            boosted = _as_request(infer, written.phrases, boosting_weight)
    except FieldError:
        raise
    except (ValueError, OSError) as error:
        (key,) = written.given.keys() & PHRASES
        raise FieldError(key, written.shown[key], "phrases that can be boosted", f"({error})") from error
    request = replace(boosted or Request(), lm=written.lm, **rules)
    try:
        decoder.open(1, [request])
    except FieldError as error:
        raise error.named(error.field.removeprefix("requests[0].")) from None
    return request


def _own_lock(lock: AllowedOptions, written: WrittenRequest) -> AllowedOptions:
    """Return the language lock of a request; a price alone replaces the price in the decoding config's lock."""
    if written.allowed_scripts or written.allowed_tokens:
        lock = replace(lock, scripts=written.allowed_scripts or (), tokens=written.allowed_tokens or (), text=None)
    elif not (lock.scripts or lock.tokens or lock.text):
        raise FieldError("allowed_price", written.allowed_price, "allowed_scripts or allowed_tokens that it is for")
    return lock if written.allowed_price is None else replace(lock, price=written.allowed_price)


def _of_nemo(written: WrittenRequest) -> Any:
    """Convert the `biasing_request` of a manifest row to NeMo's `BiasingRequestItemConfig`."""
    item: Any = written.biasing_request
    from nemo.collections.asr.parts.context_biasing.biasing_multi_model import BiasingRequestItemConfig
    from nemo.collections.asr.parts.context_biasing.boosting_graph_batched import BoostingTreeModelConfig

    try:
        config = BoostingTreeModelConfig(**item.get("boosting_model_cfg", {}))
        return BiasingRequestItemConfig(**{**item, "boosting_model_cfg": config})
    except (TypeError, AttributeError) as error:
        expected = "boosting_model_cfg, with the keys of boosting_tree, and boosting_model_alpha"
        raise FieldError("biasing_request", written.shown["biasing_request"], expected, f"({error})") from None


def biasing_request(infer: FusedInfer, biasing: Any) -> Request | None:
    """Return a stream's request from NeMo's `BiasingRequestItemConfig` or a `StreamRequest`; None if neither is given.

    Options in the request replace those in the decoding config's `boosting_tree`. Keys that NeMo lacks, such as
    `whole_words`, keep the values of the decoding config.

    Raises:
        ValueError: an option has no effect here, or the biasing model is compiled for NeMo's decoders.
    """
    if biasing is None or biasing.is_empty():
        return None
    request = getattr(biasing, "request", None)
    with fields_named("biasing_cfg.{}"):
        check_number("boosting_model_alpha", biasing.boosting_model_alpha)
    with fields_named("biasing_cfg.boosting_model_cfg.{}"):
        config = replace(infer.options.fusion.boosting, **vars(biasing.boosting_model_cfg))
    if config.is_empty:
        if request is not None:
            return request
        raise ValueError(
            "biasing_cfg holds a model that is compiled for NeMo's decoders (multi_model_id, cache_key), expected "
            "phrases in boosting_model_cfg"
        )
    weight = float(biasing.boosting_model_alpha)
    try:
        tree = infer.boosting_of(config, weight)
    except NothingLeftError as error:
        return request or _without_phrases(infer, error)
    return replace(request or Request(), boosting=tree, boosting_weight=weight)


@dataclass
class _Pending:
    model: Any
    queue: deque[Request | None]
    total: int


# A context variable, so that the requests of threads are separate. It is not an attribute of the decoder,
# because `transcribe(timestamps=True)` creates a new decoder.
_pending: ContextVar[_Pending | None] = ContextVar("pending_requests", default=None)


def _decoding(model: Any) -> Any:
    """Return NeMo's decoding object of the head that a model uses at present."""
    return model.ctc_decoding if getattr(model, "cur_decoder", None) == "ctc" else model.decoding


def _as_request(infer: FusedInfer, wanted: Wanted, boosting_weight: float | None) -> Request | None:
    if wanted is None or isinstance(wanted, Request):
        return wanted
    if isinstance(wanted, WrittenRequest):
        return request_of(infer, wanted, boosting_weight)
    if isinstance(wanted, str):
        raise ValueError(f"requests holds {wanted!r}, expected a list of phrases, a Request or None")
    if not wanted:
        return _without_phrases(infer)
    weight = infer.options.fusion.boosting_weight or None if boosting_weight is None else boosting_weight
    if weight == 0.0:
        raise FieldError("boosting_weight", 0, "a number > 0, or None for the default")
    try:
        tree = infer.boosting_of(infer.options.fusion.boosting.of_list(wanted), weight)
    except NothingLeftError as error:
        return _without_phrases(infer, error)
    return Request(boosting=tree, boosting_weight=weight_of_tree(weight, tree, len(wanted)))


def _without_phrases(infer: FusedInfer, fault: ValueError | None = None) -> Request | None:
    """Return a request without phrases; log the warning `fault` if the given phrases cannot be boosted."""
    if fault is not None:
        logger.warning("%s; the utterance is decoded without phrases of its own", fault)
    return Request(boosting_weight=0.0) if infer.options.fusion.has_phrases else None
