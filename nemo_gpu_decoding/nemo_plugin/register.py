"""Define the table of strategies, and `register()`, which makes NeMo accept them.

`HOOKS` lists the wrapped methods of NeMo. `adapters.py` wraps `AbstractCTCDecoding.__init__`,
`AbstractRNNTDecoding.__init__`, `change_decoding_strategy` and `transcribe`. `streaming/hooks.py` wraps methods that
decode greedily and ignore the config; `hypotheses.py` wraps two functions that do not support n-best lists. Importing
this module does not import NeMo: the methods are wrapped when NeMo is imported.

A `.nemo` file that was saved with a strategy of this package names the strategy in its config. NeMo without
this package cannot restore the file, unless `restore_from` gets another decoding section (for the CTC head of
a hybrid model, `aux_ctc.decoding`):

    config = EncDecCTCModelBPE.restore_from("model.nemo", return_config=True)
    with open_dict(config):
        config.decoding = {"strategy": "greedy_batch"}
    OmegaConf.save(config, "greedy.yaml")
    model = EncDecCTCModelBPE.restore_from("model.nemo", override_config_path="greedy.yaml")
"""

import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import wrapt
from omegaconf import DictConfig

from nemo_gpu_decoding.checks import did_you_mean


@dataclass(frozen=True)
class StrategySpec:
    """A decoding strategy of this package: name, model family, section of its options, and decoder factory."""

    name: str  # value of `strategy`
    family: str  # "ctc", or "rnnt" for RNN-T and TDT
    section: str  # sub-config with its options: "beam" or "wfst"
    # "module:callable"; called as `factory(owner, cfg, **networks)` with NeMo's decoding object, its
    # config and, for family rnnt, `decoder` and `joint`; returns what becomes `owner.decoding`
    factory: str


STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec("flexctc_beam", "ctc", "beam", f"{__package__}.ctc:FlexCTCInfer"),
        StrategySpec("cuda_wfst", "ctc", "wfst", f"{__package__}.word_graph:WordGraphInfer"),
        StrategySpec("paged_biglm", "ctc", "wfst", f"{__package__}.word_graph:PagedInfer"),
        StrategySpec("alsd_pp", "rnnt", "beam", f"{__package__}.transducer:ALSDInfer"),
        StrategySpec("aes_pp", "rnnt", "beam", f"{__package__}.transducer:AESInfer"),
    )
}

GREEDY = ("greedy", "greedy_batch")
# NeMo's strategies, by family and by the section that they read. With such a strategy, `<section>.search_type`
# may name a strategy of this package, for scripts that accept only NeMo's strategies.
NATIVE: dict[str, dict[str, tuple[str, ...]]] = {
    "ctc": {"greedy": GREEDY, "beam": ("beam", "beam_batch", "pyctcdecode", "flashlight"), "wfst": ("wfst",)},
    "rnnt": {"greedy": GREEDY, "beam": ("beam", "tsd", "alsd", "maes", "malsd_batch", "maes_batch")},
}


FAMILY_NAMES = {"ctc": "CTC", "rnnt": "RNN-T and TDT"}


class Hook(NamedTuple):
    """A method or function of NeMo that this package wraps."""

    module: str
    owner: str  # the class; "" for a function
    method: str
    # "module:callable"; called as `wrapper(wrapped, instance, call)`, with the arguments as `BoundArguments`. Resolved
    # at the first call, because it imports NeMo, which is only partly imported when the method is wrapped
    wrapper: str

    def apply(self, module: ModuleType) -> None:
        owner = self._owner(module)
        original = vars(owner)[self.method]  # owner.method would be a bound method, a different object
        if _state.active and not isinstance(original, _Wrapped):
            setattr(owner, self.method, _Wrapped(original, self._call, enabled=lambda: _state.active))

    def remove(self, module: ModuleType) -> None:
        owner = self._owner(module)
        if isinstance(vars(owner)[self.method], _Wrapped):
            setattr(owner, self.method, vars(owner)[self.method].__wrapped__)

    def _owner(self, module: ModuleType) -> Any:
        return getattr(module, self.owner) if self.owner else module

    def _call(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = inspect.signature(wrapped).bind(*args, **kwargs)
        return pkgutil.resolve_name(self.wrapper)(wrapped, instance, call)


HOOKS = tuple(
    Hook(f"nemo.collections.asr.{module}", owner, method, f"{__package__}.{wrapper}")
    for module, owner, method, wrapper in (
        # constructors of decoding objects
        ("parts.submodules.ctc_decoding", "AbstractCTCDecoding", "__init__", "adapters:construct"),
        ("parts.submodules.rnnt_decoding", "AbstractRNNTDecoding", "__init__", "adapters:construct"),
        # fail for n-best lists, and for character models
        (
            "parts.submodules.ctc_decoding",
            "AbstractCTCDecoding",
            "ctc_decoder_predictions_tensor",
            "adapters:native_lists",
        ),
        ("parts.submodules.ctc_decoding", "CTCDecoding", "_aggregate_token_confidence", "adapters:word_confidence"),
        # changes of a model's decoding object
        *(
            (f"models.{module}", owner, "change_decoding_strategy", "adapters:change")
            for module, owner in (
                ("ctc_models", "EncDecCTCModel"),
                ("ctc_bpe_models", "EncDecCTCModelBPE"),
                ("rnnt_models", "EncDecRNNTModel"),
                ("rnnt_bpe_models", "EncDecRNNTBPEModel"),
                ("hybrid_rnnt_ctc_models", "EncDecHybridRNNTCTCModel"),
                ("hybrid_rnnt_ctc_bpe_models", "EncDecHybridRNNTCTCBPEModel"),
            )
        ),
        # calls that change the model while they run
        *(
            (module, owner, "transcribe", "adapters:alone")
            for module, owner in (
                ("models.ctc_models", "EncDecCTCModel"),
                ("models.rnnt_models", "EncDecRNNTModel"),
                ("models.hybrid_rnnt_ctc_models", "EncDecHybridRNNTCTCModel"),
                ("parts.mixins.transcription", "TranscriptionMixin"),  # of others
            )
        ),
        ("parts.mixins.transcription", "TranscriptionMixin", "transcribe_generator", "adapters:alone_to_the_end"),
        # functions of scripts that misread n-best lists
        ("parts.utils.transcribe_utils", "", "restore_transcription_order", "hypotheses:restore_order"),
        ("parts.utils.transcribe_utils", "", "write_transcription", "hypotheses:write_lists"),
        # streaming that decodes CTC greedily, or assumes that tokens of a beam never change
        ("parts.mixins.mixins", "ASRModuleMixin", "conformer_stream_step", "streaming.hooks:stream_step"),
        ("parts.utils.streaming_utils", "FrameBatchASR", "transcribe", "streaming.hooks:transcribe_labels"),
        ("parts.utils.streaming_utils", "BatchedFrameASRRNNT", "__init__", "streaming.hooks:construct_merging"),
        ("inference.factory.base_builder", "BaseBuilder", "_build_asr", "streaming.hooks:build_asr"),
        *(
            (f"inference.pipelines.{module}_pipeline", f"{owner}Pipeline", "__init__", "streaming.hooks:construct")
            for module, owner in (
                ("buffered_ctc", "BufferedCTC"),
                ("buffered_rnnt", "BufferedRNNT"),
                ("cache_aware_ctc", "CacheAwareCTC"),
                ("cache_aware_rnnt", "CacheAwareRNNT"),
            )
        ),
    )
)


def find_strategy(cfg: DictConfig) -> StrategySpec | None:
    """Return the strategy of this package that a decoding config names (`strategy` or `search_type`), else None."""
    strategy = str(cfg.get("strategy"))
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    for section in ("beam", "wfst"):
        options = cfg.get(section)
        spec = STRATEGIES.get(str(options.get("search_type"))) if options is not None else None
        readers = {name for sections in NATIVE.values() for name in sections.get(section, ())}
        if strategy in readers and spec is not None and spec.section == section:
            return spec
    return None


def possible_strategies(family: str) -> list[str]:
    """Return the valid names of strategies for a family ("ctc" or "rnnt"): NeMo's, then this package's."""
    native = [name for names in NATIVE[family].values() for name in names]
    return native + [spec.name for spec in STRATEGIES.values() if spec.family == family]


def other_strategies(strategy: str, family: str) -> str:
    """Return a text for NeMo's error about an unknown strategy, with this package's strategies and a similar name."""
    if strategy in possible_strategies(family):
        return ""
    ours = ", ".join(spec.name for spec in STRATEGIES.values() if spec.family == family)
    hint = did_you_mean(strategy, possible_strategies(family), " Did you mean '{}'?")
    return f". nemo-gpu-decoding adds for {FAMILY_NAMES[family]}: {ours}.{hint}"


def wrong_family(spec: StrategySpec, family: str, what: str) -> str:
    """Return the error message for a strategy that cannot decode `what`, a model or head of this family."""
    return (
        f"strategy is '{spec.name}', which decodes {FAMILY_NAMES[spec.family]} models, but {what} "
        f"is for {FAMILY_NAMES[family]}; possible here: {', '.join(possible_strategies(family))}"
    )


def head_of(strategy: str, heads: Sequence[str]) -> str:
    """Return the name of the head that a strategy decodes: the first one if it decodes several, or is unknown."""
    spec = STRATEGIES.get(strategy)
    if spec and spec.family not in heads:
        raise ValueError(wrong_family(spec, heads[0], "this model"))
    return spec.family if spec else next((head for head in heads if strategy in possible_strategies(head)), heads[0])


def register() -> None:
    """Register this package's strategies with NeMo in this process. Repeated calls have no effect.

    If the package is installed, NeMo calls this function itself (see `hydra_plugins`). A script that runs from
    a source tree must call it once.
    """
    _state.active = True
    for hook in HOOKS:  # hooks of modules that are imported are called at once, and repeated ones have no effect
        wrapt.register_post_import_hook(hook.apply, hook.module)


def unregister() -> None:
    """Restore NeMo's original methods. Existing decoding objects remain valid."""
    _state.active = False
    for hook in HOOKS:
        if hook.module in sys.modules:
            hook.remove(sys.modules[hook.module])


_state = SimpleNamespace(active=False)  # post-import hooks cannot be removed: they check it


class _Wrapped(wrapt.FunctionWrapper):
    """A wrapper of a NeMo method; after `unregister`, it only calls the original method."""
