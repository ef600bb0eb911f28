"""Word errors of the transcript, of the best text of the n-best list, and of the best path through word alternatives.

`python -m benchmarks.alternatives --help` lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from nemo_gpu_decoding.cli.decoding import decoding_config, section_of
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.metrics import oracle_text, word_errors
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.report import format_table
from nemo_gpu_decoding.search.slots import Slot

PROGRAM = "python -m benchmarks.alternatives"
SUMMARY = "word errors of the best path through word alternatives"
EXAMPLES = (
    "model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json strategies=[flexctc_beam] "
    "lm=assets/self/lm/tok3.arpa lm_weight=0.6 beam_beta=1.0 beams=[16,32]",
)
BATCH = 16


@dataclass
class AlternativesOptions:
    """Options of the table."""

    # A .nemo file.
    model: str = MISSING
    # NeMo manifest.
    manifest: str = MISSING
    # Strategies.
    strategies: list[str] = field(default_factory=lambda: ["flexctc_beam"])
    # LM, its weight, and the bonus per token; null: none.
    lm: str | None = None
    lm_weight: float | None = None
    beam_beta: float | None = None
    # Beams, and lengths of the n-best lists.
    beams: list[int] = field(default_factory=lambda: [16])
    # Word graphs: alternatives of lattices in place of n-best lists.
    lattices: bool = False


OPTIONS = AlternativesOptions


def fewest_errors(reference: str, slots: Sequence[Slot]) -> int:
    """The fewest word errors of a text that takes one alternative of each slot."""
    words = reference.split()
    row = list(range(len(words) + 1))  # errors of the slots so far, by words of the reference
    for slot in slots:
        options = {option.word for option in slot.alternatives}
        skipped = int("" not in options)
        new = [row[0] + skipped]
        for n, word in enumerate(words):
            new.append(min(row[n] + int(word not in options), row[n + 1] + skipped, new[n] + 1))
        row = new
    return row[-1]


def run(options: AlternativesOptions) -> int:
    """Print the table."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device="cpu")
    utterances = read_manifest(Path(options.manifest))
    outputs = list(model.encode([utterance.path for utterance in utterances], BATCH))
    references = [str(utterance.text) for utterance in utterances]
    rows = []
    for strategy in options.strategies:
        for beam in options.beams:
            weights = {name: getattr(options, name) for name in ("lm", "lm_weight", "beam_beta")}
            config, section = decoding_config(strategy, None, weights), section_of(strategy)
            own: dict[str, Any] = {"beam_size": beam, "n_best": beam, "return_best_hypothesis": False}
            added = {"compute_timestamps": True, section: {"decoding_mode": "lattice"} if options.lattices else own}
            model.head(STRATEGIES[strategy].family).use(cast(DictConfig, OmegaConf.merge(config, added)))
            found = [transcript for batch in outputs for transcript in model.decode(batch)]
            first = word_errors(references, [each.text for each in found])
            best = [
                oracle_text(reference, [each.text, *(text for text, _ in each.n_best)], each.lattice)
                for reference, each in zip(references, found, strict=True)
            ]
            network = sum(  # an utterance with one text has no alternatives
                fewest_errors(text, each.alternatives) if each.alternatives else word_errors([text], [each.text]).total
                for text, each in zip(references, found, strict=True)
            )
            errors = [first.total, word_errors(references, best).total, network]
            cells = [f"{100 * each / first.words:.1f}" for each in errors]
            rows.append([strategy, "-" if options.lattices else beam, *cells, f"{network / first.total:.2f}"])
    columns = ["WER %", "of the best text", "of the best alternatives", "ratio"]
    print(format_table(["strategy", "beam", *columns], rows))
    return 0


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
