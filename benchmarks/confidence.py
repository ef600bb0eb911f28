"""Word confidence on a test set, before and after the map that `tune confidence=...` fits on a dev set.

`python -m benchmarks.confidence --help` lists the options.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from omegaconf import MISSING, DictConfig, OmegaConf

from nemo_gpu_decoding.cli.decoding import decoding_config, section_of
from nemo_gpu_decoding.cli.dev_set import joined, with_confidence_map, words_of
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.cli.tune import AGGREGATIONS
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.metrics import measure
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.confidence"
SUMMARY = "word confidence before and after its map"
EXAMPLES = (
    "model=assets/self/models/self_ctc.nemo dev=assets/self/speech/dev.json test=assets/self/speech/test.json "
    "lm=assets/self/lm/tok3.arpa lm_weight=0.6 beam_beta=1.0",
)


@dataclass
class ConfidenceOptions:
    """Options of the table."""

    # A .nemo file.
    model: str = MISSING
    # NeMo manifests: the map is fitted on dev and measured on test.
    dev: str = MISSING
    test: str = MISSING
    # Strategies.
    strategies: list[str] = field(default_factory=lambda: ["flexctc_beam"])
    # LM, its weight, and the bonus per token; null: none.
    lm: str | None = None
    lm_weight: float | None = None
    beam_beta: float | None = None


OPTIONS = ConfidenceOptions
BATCH = 16


def run(options: ConfidenceOptions) -> int:
    """Print the table."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device="cpu")
    dev, test = (read_manifest(Path(name)) for name in (options.dev, options.test))
    outputs = list(model.encode([utterance.audio for utterance in test], BATCH))
    rows = []
    for strategy in options.strategies:
        head = model.head(STRATEGIES[strategy].family)
        given = {name: getattr(options, name) for name in ("lm", "lm_weight", "beam_beta")}
        config = decoding_config(strategy, None, {name: value for name, value in given.items() if value is not None})
        mapped, _ = with_confidence_map(head, config, dev, AGGREGATIONS, BATCH)
        aggregation, section = mapped.confidence_cfg.aggregation, section_of(strategy)
        plain = cast(DictConfig, OmegaConf.merge(mapped, {section: {"confidence_map": None}}))
        found = [joined(words_of(head, own, test, outputs)) for own in (plain, mapped)]
        numbers = [f"{value:.3f}" for words in found for value in measure(*words)]
        rows.append([strategy, aggregation, str(len(found[0][0])), *numbers])
    measures = ["ECE", "NCE", "AUC"]
    print(format_table(["strategy", "aggregation", "words", *measures, "mapped: ECE", *measures[1:]], rows))
    return 0


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
