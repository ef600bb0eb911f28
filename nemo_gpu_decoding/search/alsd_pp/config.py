"""Options of alsd_pp. Names and defaults are those of NeMo's `beam` section for `malsd_batch`."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_int
from nemo_gpu_decoding.search.transducer.config import TransducerConfig


@dataclass(frozen=True)
class ALSDConfig(TransducerConfig):
    """Options of `ALSDPlusPlus`; the rest is in `TransducerConfig`."""

    # After so many tokens without moving on to a later frame, a hypothesis is given a blank.
    max_symbols: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_symbols", self.max_symbols, 1, 2**30)
