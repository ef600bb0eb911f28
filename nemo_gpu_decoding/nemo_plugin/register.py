"""Makes our strategies known to NeMo: the table of strategies, and `register()`.

Every decoding object of NeMo is made by `AbstractCTCDecoding.__init__` or
`AbstractRNNTDecoding.__init__`. These two are wrapped (`constructors.py`); nothing else of NeMo is
touched. Importing this module does not import NeMo: the wrapping waits until NeMo is imported.

A `.nemo` file that was saved with one of our strategies names it in its config, and NeMo alone refuses
to restore it. Where this package is not at hand, give `restore_from` another decoding section (a
hybrid model's CTC head has its own under `aux_ctc.decoding`):

    config = EncDecCTCModelBPE.restore_from("model.nemo", return_config=True)
    with open_dict(config):
        config.decoding = {"strategy": "greedy_batch"}
    OmegaConf.save(config, "greedy.yaml")
    model = EncDecCTCModelBPE.restore_from("model.nemo", override_config_path="greedy.yaml")
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt
from omegaconf import DictConfig


@dataclass(frozen=True)
class StrategySpec:
    """One decoding strategy as NeMo's configs name it."""

    name: str  # value of `strategy`
    family: str  # "ctc", or "rnnt" for RNN-T and TDT
    section: str  # sub-config that holds its options: "beam" or "wfst"
    # "module:callable"; called as `factory(owner, cfg, **networks)` with NeMo's decoding object, its
    # config and, for family rnnt, `decoder` and `joint`; returns what becomes `owner.decoding`
    factory: str

    def build(self, owner: Any, cfg: DictConfig, **networks: Any) -> Any:
        return pkgutil.resolve_name(self.factory)(owner, cfg, **networks)


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

# NeMo's own strategies, by family and by the section they read. With one that reads a section,
# `<section>.search_type` may name ours: for scripts that accept only the strategies they know.
NATIVE: dict[str, dict[str, tuple[str, ...]]] = {
    "ctc": {
        "greedy": ("greedy", "greedy_batch"),
        "beam": ("beam", "beam_batch", "pyctcdecode", "flashlight"),
        "wfst": ("wfst",),
    },
    "rnnt": {
        "greedy": ("greedy", "greedy_batch"),
        "beam": ("beam", "tsd", "alsd", "maes", "malsd_batch", "maes_batch"),
    },
}

CONSTRUCTORS = {  # family -> where NeMo makes its decoding objects
    "ctc": ("nemo.collections.asr.parts.submodules.ctc_decoding", "AbstractCTCDecoding"),
    "rnnt": ("nemo.collections.asr.parts.submodules.rnnt_decoding", "AbstractRNNTDecoding"),
}


def find_strategy(cfg: DictConfig) -> StrategySpec | None:
    """The strategy of ours that a decoding config asks for, by `strategy` or by `search_type`."""
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
    """All that `strategy` may be for a family: NeMo's names, then ours."""
    native = [name for names in NATIVE[family].values() for name in names]
    return native + [spec.name for spec in STRATEGIES.values() if spec.family == family]


def register() -> None:
    """Let NeMo accept our strategies from now on, in this process. Calling it again changes nothing.

    NeMo calls this by itself where the package is installed (see `hydra_plugins`); a script that runs
    from a source tree calls it once.
    """
    _state.active = True
    if _state.hooked:
        for family, (module, _) in CONSTRUCTORS.items():
            if module in sys.modules:
                _wrap_constructor(family, sys.modules[module])
        return
    _state.hooked = True
    for family, (module, _) in CONSTRUCTORS.items():
        wrapt.register_post_import_hook(functools.partial(_wrap_constructor, family), module)


def unregister() -> None:
    """Give NeMo its own constructors back. Decoding objects that exist already keep working."""
    _state.active = False
    for module, class_name in CONSTRUCTORS.values():
        if module in sys.modules:
            cls = getattr(sys.modules[module], class_name)
            constructor = vars(cls)["__init__"]  # cls.__init__ would be bound, and so another object
            if isinstance(constructor, _Constructor):
                cls.__init__ = constructor.__wrapped__


@dataclass
class _State:
    active: bool = False
    hooked: bool = False  # post-import hooks cannot be taken back: they are set once and ask `active`


_state = _State()


class _Constructor(wrapt.FunctionWrapper):
    """A constructor of NeMo with our wrapper around it. Sleeps after `unregister`, should another
    wrapper have been put on top of it."""


def _wrap_constructor(family: str, module: ModuleType) -> None:
    cls = getattr(module, CONSTRUCTORS[family][1])
    if not _state.active or isinstance(vars(cls)["__init__"], _Constructor):
        return

    def construct(wrapped: Any, instance: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        # imported here, since it imports NeMo, which may only be half imported by now
        from nemo_gpu_decoding.nemo_plugin.constructors import construct as with_strategy

        with_strategy(family, wrapped, instance, args, kwargs)

    cls.__init__ = _Constructor(vars(cls)["__init__"], construct, enabled=lambda: _state.active)
