"""Give Hydra a typed `wfst` section with this package's keys.

NeMo's scripts have a dataclass for the section, and Hydra refuses keys that this dataclass lacks. A subclass of
NeMo's dataclass adds keys: the presets of word graphs name the subclass in their `defaults`.
"""

from dataclasses import make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig

from nemo_gpu_decoding.nemo_plugin.word_graph_sections import CUDA_WFST, PAGED_BIGLM


def store_schemas() -> None:
    """Register the `wfst` section of each word-graph strategy with Hydra, in the group `ctc_decoding/wfst`."""
    nemos = type(CTCDecodingConfig().wfst)
    for section in (CUDA_WFST, PAGED_BIGLM):
        defaults = {"beam_size": section.defaults["beam_size"]} | section.added  # NeMo's own has no default
        keys = [(key, Any, value) for key, value in defaults.items()]
        schema = make_dataclass(section.strategy, keys, bases=(nemos,))
        schema.__module__ = __name__
        globals()[section.strategy] = schema  # pickle finds it there
        ConfigStore.instance().store(group="ctc_decoding/wfst", name=section.strategy, node=schema)
