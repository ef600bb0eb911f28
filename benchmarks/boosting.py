"""Phrase boosting with each way of paying phrases: word errors, and phrases found, missed and false.

The encoder runs once; each row of the table is one search. `python -m benchmarks.boosting --help` lists the options.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING, DictConfig

from benchmarks.boosting_cells import spoken, unspoken
from nemo_gpu_decoding.cli.decoding import DEFAULT_STRATEGY, decoding_config, load_phrase_file, section_of
from nemo_gpu_decoding.cli.dev_set import encode
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.boosting"
SUMMARY = "phrase boosting with each way of paying phrases"
EXAMPLES = (
    "model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json phrases=assets/self/phrases.txt",
)
# row of the table -> keys of `boosting_tree`
WAYS: dict[str, dict[str, object]] = {
    "overlapping: false": {"overlapping": False},
    "overlapping: true": {"overlapping": True},
    "refund: nemo": {"refund": "nemo", "overlapping": True},
}


@dataclass
class BoostingOptions:
    """Options of the table."""

    # A .nemo file.
    model: str = MISSING
    # NeMo manifest of the test set.
    manifest: str = MISSING
    # Text file of phrases to boost, one per line.
    phrases: str = MISSING
    # Only phrases that the references hold (true), or only others (false), without their own weights; null: all.
    spoken: bool | None = None
    # Decoding strategy. Word graphs have one way of paying phrases.
    strategy: str = DEFAULT_STRATEGY["ctc"]
    # LM of the strategy, or null.
    lm: str | None = None
    # Weight of the LM.
    lm_weight: float = 0.5
    # Boosting weights, natural log, > 0.
    weights: list[float] = field(default_factory=lambda: [0.75, 1.5])
    # Threshold of a phrase's evidence, 0 .. 1, for further rows with the first way; 0: no such rows.
    ac_threshold: float = 0.0
    # Beam sizes; word graphs have none.
    beams: list[int] = field(default_factory=lambda: [4, 16])


OPTIONS = BoostingOptions


def run(options: BoostingOptions) -> int:
    """Print the table of one model, set and strategy."""
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

    phrases = load_phrase_file(options.phrases)
    head = Model.load(options.model, device="cpu").head(STRATEGIES[options.strategy].family)
    speech = encode(head, read_manifest(Path(options.manifest)))
    rows, listed = [], None
    if options.spoken is not None:
        phrases = listed = (spoken if options.spoken else unspoken)(phrases, speech.references)
    for name, beam, weight, config in searches(options, listed):
        texts = speech.decode(head.search(config), head.text_of)
        score = speech.score(texts, phrases)
        found = score.phrases
        assert found is not None
        counts = [found.true_positives, found.false_negatives, found.false_positives]
        rows.append([name, beam or "", weight, f"{100 * score.errors.wer:.2f}", *counts])
    print(format_table(["phrases", "beam_size", "weight", "WER %", "found", "missed", "false"], rows))
    return 0


def searches(
    options: BoostingOptions, listed: list[str] | None = None
) -> list[tuple[str, int | None, float, DictConfig]]:
    """Way of paying phrases, beam size, boosting weight and `decoding` section of each row.

    Args:
        listed: phrases in the place of those of the file.
    """
    section = section_of(options.strategy)
    ways: dict[str, dict[str, object]] = {"word graph": {}} if section == "wfst" else dict(WAYS)
    if options.ac_threshold:
        limited = {"ac_threshold": options.ac_threshold}
        ways[f"ac_threshold: {options.ac_threshold:g}"] = {**next(iter(ways.values())), **limited}
    lm = {"lm": options.lm, "lm_weight": options.lm_weight} if options.lm else {}
    found = []
    for beam in options.beams if section == "beam" else [None]:
        given = {**lm, "beam_size": beam}
        found.append(("no phrases", beam, 0.0, decoding_config(options.strategy, None, given)))
        for weight in options.weights:
            given |= {"phrases": options.phrases, "boosting_weight": weight}
            for name, keys in ways.items():
                config = decoding_config(options.strategy, None, given)
                if listed is not None:
                    keys = {**keys, "key_phrases_file": None, "key_phrases_list": listed}
                config[section].boosting_tree.update(keys)
                found.append((name, beam, weight, config))
    return found


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
