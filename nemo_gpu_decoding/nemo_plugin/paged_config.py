"""From NeMo's CTC decoding config to the options of paged_biglm.

The keys are those of cuda_wfst (`wfst_config.py`), whose LM or graph is the small LM's here, and

    strategy: paged_biglm
    wfst:
      arpa_lm_path: small.arpa       # or wfst_lm_path: small.graph, and small_lm_path: small.arpa
      large_lm_path: large.packed      # from `nemo-gpu-decoding pack-lm`, or an ARPA file
      large_lm_weight: 1.0
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_gpu_decoding.nemo_plugin.beam_options import existing_file, given_options
from nemo_gpu_decoding.nemo_plugin.strict import read_choice, read_number
from nemo_gpu_decoding.nemo_plugin.wfst_config import (
    WfstOptions,
    fields_named_as_keys,
    read_wfst_options,
    wfst_keys,
)
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.paged_biglm.config import (
    COMPOSITIONS,
    DIFFERENCES,
    PLACEMENTS,
    PagedBigLMConfig,
)

# What we add to the `wfst` section of cuda_wfst, with the values that it has if it is not set
PAGED_KEYS: dict[str, Any] = {
    "large_lm_path": None,  # packed, or an ARPA file, which is packed in memory whenever it is loaded
    "small_lm_path": None,  # likewise; None: arpa_lm_path. For ready-made graphs: what they were made of
    "large_lm_weight": PagedBigLMConfig.large_lm_weight,
    "composition": PagedBigLMConfig.composition,
    "group_size": PagedBigLMConfig.group_size,
    "difference": PagedBigLMConfig.difference,
    "placement": PagedBigLMConfig.placement,
    "cache_mb": PagedBigLMConfig.cache_mb,
}
_CHOICES = {"composition": COMPOSITIONS, "difference": DIFFERENCES, "placement": PLACEMENTS}


@dataclass(frozen=True)
class PagedOptions(WfstOptions):
    """Everything that a `wfst` section says to paged_biglm."""

    search: PagedBigLMConfig
    large: Path  # the large LM, packed or ARPA
    small: Path  # the LM that the graph is made of, packed or ARPA


def paged_keys() -> dict[str, tuple[str, ...]]:
    """The valid keys of `wfst` and of the section in it."""
    keys = wfst_keys()
    return keys | {"wfst": (*keys["wfst"], *PAGED_KEYS)}


def read_paged_options(cfg: DictConfig) -> PagedOptions:
    """Read NeMo's decoding config, checking every key that its `wfst` section has.

    Raises:
        ValueError, FileNotFoundError: as `read_wfst_options`.
    """
    options = read_wfst_options(cfg, "paged_biglm", tuple(PAGED_KEYS))
    given = given_options(cfg, "wfst")
    wfst = PAGED_KEYS | given
    large = existing_file("wfst.large_lm_path", wfst["large_lm_path"])
    if large is None:
        raise ValueError(
            "wfst.large_lm_path is not set, expected the large LM of paged_biglm: a file of "
            "`nemo-gpu-decoding pack-lm`, or an ARPA file"
        )
    small = _small_lm(wfst["small_lm_path"], given.get("arpa_lm_path"))
    others = {field.name: getattr(options, field.name) for field in fields(options)}
    others["search"] = _search_config(options.search, wfst)
    return PagedOptions(**others, large=large, small=small)


def _search_config(shared: WFSTConfig, wfst: dict[str, Any]) -> PagedBigLMConfig:
    choices: dict[str, Any] = {
        key: read_choice(f"wfst.{key}", wfst[key], names) for key, names in _CHOICES.items()
    }
    with fields_named_as_keys():
        return PagedBigLMConfig(
            **vars(shared),
            **choices,
            large_lm_weight=read_number("large_lm_weight", wfst["large_lm_weight"]),
            group_size=wfst["group_size"],
            cache_mb=wfst["cache_mb"],
        )


def _small_lm(own: Any, arpa: Any) -> Path:
    """Where the small LM's own scores come from, which the search takes back at every word."""
    if own is not None and arpa is not None:
        raise ValueError(
            "wfst.small_lm_path and wfst.arpa_lm_path are both set, expected one of them: the LM of the "
            "graph (wfst.small_lm_path where wfst.wfst_lm_path is a ready-made graph)"
        )
    path = existing_file("wfst.small_lm_path", own) or existing_file("wfst.arpa_lm_path", arpa)
    if path is None:
        raise ValueError(
            "wfst.small_lm_path is not set, expected the LM that the graph (wfst.wfst_lm_path) was made "
            "of: an ARPA file, or a packed one"
        )
    return path
