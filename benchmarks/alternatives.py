"""Word errors of the transcript, and of the best path through word alternatives.

`python -m benchmarks.alternatives --help` lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from benchmarks.options import BenchOptions
from benchmarks.ours import OURS
from benchmarks.peers.base import Setting
from benchmarks.sources import make_tasks
from nemo_gpu_decoding.cli.decoding import decoding_config, section_of
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.search.alternatives import timed_words, word_alternatives
from nemo_gpu_decoding.search.result import Place

PROGRAM = "python -m benchmarks.alternatives"
SUMMARY = "word errors of the best path through word alternatives"
EXAMPLES = (
    "model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json strategies=[flexctc_beam] "
    "lm=assets/self/lm/tok3.arpa lm_weight=0.6 beam_beta=1.0 beams=[16,32]",
    "hard=true strategies=[flexctc_beam,alsd_pp,aes_pp]",
)
BATCH = 16


@dataclass
class AlternativesOptions:
    """Options of the table."""

    # A .nemo file and a NeMo manifest.
    model: str | None = None
    manifest: str | None = None
    # In place of them: the hard task of the benchmarks, with its own LM and weights.
    hard: bool = False
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


def fewest_errors(reference: str, places: Sequence[Place]) -> int:
    """The fewest word errors of a text that takes one alternative of each place."""
    words = reference.split()
    row = list(range(len(words) + 1))  # errors of the places so far, by words of the reference
    for place in places:
        options = {option.word for option in place.alternatives}
        skipped = int("" not in options)
        new = [row[0] + skipped]
        for n, word in enumerate(words):
            new.append(min(row[n] + int(word not in options), row[n + 1] + skipped, new[n] + 1))
        row = new
    return row[-1]


def run(options: AlternativesOptions) -> int:
    """Print the table.

    Raises:
        ValueError: neither a model with a manifest nor `hard` is set, or both.
    """
    if options.hard == bool(options.model) or bool(options.model) != bool(options.manifest):
        raise ValueError(
            f"model={options.model}, manifest={options.manifest}, hard={options.hard}, expected model and manifest, "
            "or hard=true"
        )
    rows = []
    for strategy in options.strategies:
        for beam in options.beams:
            for name, references, found in (_of_hard if options.hard else _of_model)(options, strategy, beam):
                rows.append([name, "-" if options.lattices and not options.hard else beam, *_cells(references, found)])
    columns = ["WER %", "of the best alternatives", "ratio"]
    print(format_table(["strategy", "beam", *columns], rows))
    return 0


class Found(NamedTuple):
    """The results of an utterance."""

    text: str  # the best one
    places: Sequence[Place]


def _cells(references: list[str], results: Sequence[Found]) -> list[str]:
    first = word_errors(references, [result.text for result in results])
    network = sum(  # an utterance with one text has no alternatives
        fewest_errors(text, result.places) if result.places else word_errors([text], [result.text]).total
        for text, result in zip(references, results, strict=True)
    )
    return [*(f"{100 * count / first.words:.1f}" for count in (first.total, network)), f"{network / first.total:.2f}"]


def _of_model(options: AlternativesOptions, strategy: str, beam: int) -> Iterator[tuple[str, list[str], list[Found]]]:
    model, references, outputs = _encoded(str(options.model), str(options.manifest))
    weights = {name: getattr(options, name) for name in ("lm", "lm_weight", "beam_beta")}
    config, section = decoding_config(strategy, None, weights), section_of(strategy)
    n_best = {"beam_size": beam, "n_best": beam, "return_best_hypothesis": False}
    added = {"compute_timestamps": True, section: {"decoding_mode": "lattice"} if options.lattices else n_best}
    model.head(STRATEGIES[strategy].family).use(cast(DictConfig, OmegaConf.merge(config, added)))
    results = [transcript for batch in outputs for transcript in model.decode(batch)]
    found = [Found(transcript.text, transcript.alternatives) for transcript in results]
    yield strategy, references, found


@lru_cache(maxsize=1)
def _encoded(name: str, manifest: str) -> tuple[Any, list[str], list[Any]]:
    """The model, the references, and the outputs of its encoder."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(name, device="cpu")
    utterances = read_manifest(Path(manifest))
    outputs = list(model.encode([utterance.audio for utterance in utterances], BATCH))
    return model, [str(utterance.text) for utterance in utterances], outputs


def _of_hard(options: AlternativesOptions, strategy: str, beam: int) -> Iterator[tuple[str, list[str], list[Found]]]:
    """The hard task, with its LM and weights."""
    bench = BenchOptions(strategy=strategy, tasks=["hard"], utterances=1000)
    for task in make_tasks(bench):
        decoder = OURS[strategy](bench, task, Setting(beam, lm=True)).decoder
        more: dict[str, Any] = {"lattice": True} if options.lattices else {"n_best": beam}
        decoder = decoder.with_options(replace(decoder.config, **more), decoder.fusion)
        found = []
        for nbest in decoder.decode(task.inputs, task.lengths):
            lattice = nbest.lattice and nbest.lattice.determinized()
            text = " ".join(word.text for word in timed_words(nbest.best, task.vocabulary))
            found.append(Found(text, word_alternatives(nbest.paths, task.vocabulary, lattice)))
        yield f"{strategy}, {task.name}", task.texts, found


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
