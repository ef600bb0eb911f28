"""Set LM, phrases, language lock, grammar and weights for each utterance of a call of NeMo's `transcribe`."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.checks import FieldError, NothingLeftError, check_number, fields_named, having
from nemo_gpu_decoding.fusion.boosting import weight_of_tree
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.fusion.grammar import MOST_LETTERS
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel

    from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase
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
    queue = deque(_compiled(infer, wanted, boosting_weight) for wanted in requests)
    total = len(queue)
    with having(_pending, (model, queue, total)):
        yield
    # not if the block fails: an error inside the block is more informative than leftover requests
    if queue:
        raise ValueError(f"requests has {total} entries, but {total - len(queue)} utterances were decoded")


def infer_of(model: ASRModel, where: str = "") -> FusedInfer:
    """Return the decoder of a model's current strategy; raise a ValueError if the strategy is one of NeMo's."""
    from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer

    infer = getattr(decoding_of(model), "decoding", None)
    getattr(infer, "options", None)  # raises the error of a model that was restored without its files
    if not isinstance(infer, FusedInfer):
        raise ValueError(
            f"{where}the model decodes with strategy '{decoding_of(model).cfg.strategy}', expected "
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
    model, queue, total = _pending.get() or (None, deque[Request | None](), 0)
    if model is None or decoding_of(model).decoding is not infer:
        return None
    if len(queue) < batch:
        done = total - len(queue)
        raise ValueError(f"requests has {total} entries, but after {done} utterances {batch} more are decoded")
    return [queue.popleft() for _ in range(batch)]


def request_of(infer: FusedInfer, written: WrittenRequest, most_letters: int = MOST_LETTERS) -> Request:
    """Compile an utterance's written request: build tree, grammar and language lock, and check them.

    Phrases without a weight have the config's `boosting_tree_alpha`.

    Args:
        most_letters: maximum number of letters in its grammar.

    Raises:
        FieldError: the strategy has no such LM, cannot boost the phrases, or takes no lock or grammar.
    """
    from nemo_gpu_decoding.nemo_plugin.infer import load_allowed, load_grammar

    fusion, decoder = infer.options.fusion, infer.decoder()
    rules: dict[str, Any] = {}
    for key in written.given.keys() - {*PHRASES, "boosting_weight", "lm"}:
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
    boosted = None
    try:
        if written.biasing_request is not None:
            boosted = biasing_request(infer, _of_nemo(written))
        elif written.phrases is not None:
            weight = written.boosting_weight or fusion.boosting_weight or None
            boosted = _boosted(infer, fusion.boosting.of_list(written.phrases), weight, written.lm)
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
    boosted = _boosted(infer, config, float(biasing.boosting_model_alpha))
    if request is None or boosted is None:
        return request or boosted
    return replace(request, boosting=boosted.boosting, boosting_weight=boosted.boosting_weight)


# A model, its requests that are not decoded yet, and their number at first. A context variable, so that the requests
# of threads are separate; no attribute of the decoder, because `transcribe(timestamps=True)` creates a new decoder.
_pending: ContextVar[tuple[Any, deque[Request | None], int] | None] = ContextVar("pending_requests", default=None)


def decoding_of(model: Any) -> Any:
    """Return NeMo's decoding object of the head that a model uses at present."""
    return model.ctc_decoding if getattr(model, "cur_decoder", None) == "ctc" else model.decoding


def _compiled(infer: FusedInfer, wanted: Wanted, boosting_weight: float | None) -> Request | None:
    if wanted is None or isinstance(wanted, Request):
        return wanted
    if not isinstance(wanted, WrittenRequest):
        wanted = WrittenRequest(wanted, boosting_weight)
    return request_of(infer, wanted)


def _boosted(infer: FusedInfer, config: BoostingConfig, weight: float | None, lm: str | None = None) -> Request | None:
    """Return a request with the phrases of a config; with a warning one without phrases if none can be boosted.

    Args:
        weight, lm: see `FusedInfer.boosting_of`.
    """
    if not config.is_empty:
        try:
            tree = infer.boosting_of(config, weight, lm)
            return Request(tree, weight_of_tree(weight, tree, len(config.key_phrases_list or ())))
        except NothingLeftError as error:
            logger.warning("%s; the utterance is decoded without phrases of its own", error)
    return Request(boosting_weight=0.0) if infer.options.fusion.has_phrases else None
