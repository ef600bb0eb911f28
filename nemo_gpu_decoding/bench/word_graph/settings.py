"""What a row asks of a search of a word graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Setting


@dataclass(frozen=True)
class GraphSetting(Setting):
    """`beam_size` is the beam here: what a hypothesis may cost above the best, natural log, scaled."""

    max_active: int = 10_000
    topology: str = "compact"
    acoustic_scale: float = 1.0

    def as_params(self) -> dict[str, Any]:
        return super().as_params() | {
            "max_active": self.max_active,
            "topology": self.topology,
            "acoustic_scale": self.acoustic_scale,
        }


def graph_setting(options: BenchOptions, beam: int) -> GraphSetting:
    return GraphSetting(
        beam_size=beam,
        lm=True,
        threads=options.threads,
        max_active=options.max_active,
        topology=options.topology,
        acoustic_scale=options.acoustic_scale,
    )
