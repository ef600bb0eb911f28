"""Phrase boosting with each way of paying overlapping phrases: word errors, and phrases found, missed and false.

    python -m benchmarks.boosting model=self_ctc.nemo manifest=test.json phrases=names.txt strategy=flexctc_beam

The encoder runs once; each row of the table is one search. Options, as NAME=VALUE[,VALUE...]:

    model, manifest, phrases, strategy   as those of `nemo-gpu-decoding tune`
    lm, lm_weight                        token-level LM and its weight; without `lm` no LM is used
    weights                              boosting weights, natural log (0.75,1.5)
    beams                                beam sizes (4,16); word graphs have none
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_gpu_decoding.cli.decoding import decoding_config, load_phrase_file, section_of
from nemo_gpu_decoding.cli.dev_set import encode
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.nemo_plugin.model import Model
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.report import format_table

# row of the table -> keys of `boosting_tree`
WAYS: dict[str, dict[str, object]] = {
    "overlapping: false": {"overlapping": False},
    "overlapping: true": {"overlapping": True},
    "refund: nemo": {"refund": "nemo", "overlapping": True},
}
DEFAULTS = {"lm": "", "lm_weight": "0.5", "weights": "0.75,1.5", "beams": "4,16"}


def main(arguments: Sequence[str]) -> None:
    """Print the table of one model, set and strategy."""
    options = DEFAULTS | dict(argument.split("=", 1) for argument in arguments)
    strategy, lm = options["strategy"], options["lm"]
    phrases = load_phrase_file("phrases", options["phrases"])
    head = Model.load(options["model"], device="cpu").head(STRATEGIES[strategy].family)
    speech = encode(head, read_manifest(Path(options["manifest"])))
    section = section_of(strategy)
    in_graph = section == "wfst"
    ways = {"word graph": {}} if in_graph else WAYS
    rows = []
    for beam in [None] if in_graph else map(int, options["beams"].split(",")):
        for weight in [0.0, *map(float, options["weights"].split(","))]:
            for way, keys in ways.items() if weight else [("no phrases", {})]:
                given = {"lm": lm, "lm_weight": float(options["lm_weight"])} if lm else {}
                if weight:
                    given |= {"phrases": options["phrases"], "boosting_weight": weight}
                config = decoding_config(strategy, None, given | {"beam_size": beam})
                if weight:
                    config[section].boosting_tree.update(keys)
                texts = speech.decode(head.search(config), head.text_of).texts
                score = speech.score(texts, phrases)
                found = score.phrases
                assert found is not None
                counts = [found.true_positives, found.false_negatives, found.false_positives]
                rows.append([way, beam, weight, f"{100 * score.errors.wer:.2f}", *counts])
    print(format_table(["phrases", "beam_size", "weight", "WER %", "found", "missed", "false"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
