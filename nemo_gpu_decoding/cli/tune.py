"""`nemo-gpu-decoding tune`: weights that suit a model, an LM and a phrase list, found on a dev set."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from nemo_gpu_decoding.cli.audio import read_manifest
from nemo_gpu_decoding.cli.presets import decoding_config, existing_file, write_preset
from nemo_gpu_decoding.cli.table import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.cli.dev_set import Decoded, DevSet, Score
    from nemo_gpu_decoding.nemo_plugin.session import Session
    from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam

EXAMPLES = (
    "model=model.nemo manifest=dev.json lm=lm.arpa out=best.yaml",
    "model=model.nemo manifest=dev.json lm=lm.arpa phrases=names.txt boosting_weight=[0.5,1,2]",
    "model=model.nemo manifest=dev.json lm=lm.arpa lm_weight=[0.3,0.4,0.5] beam_size=[4,8,16]",
)
STORES = ("float32", "float16")


@dataclass
class TuneOptions:
    """Options of `tune`. Lists are the values to try; every combination is decoded."""

    # A .nemo file with a CTC head, or the name of a pretrained model that NeMo can fetch.
    model: str = MISSING
    # NeMo manifest of the dev set: JSON lines with audio_filepath (relative to the manifest) and text.
    manifest: str = MISSING
    # Token-level n-gram LM: an ARPA file or NeMo's NGPU-LM (.nemo).
    lm: str | None = None
    # Text file of phrases to boost, one per line; their precision, recall and F-score are reported.
    phrases: str | None = None
    # LM weights to try, natural log, >= 0; used if an LM is given.
    lm_weight: list[float] = field(default_factory=lambda: [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    # Insertion bonuses per token to try, natural log.
    beam_beta: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0, 1.5])
    # Boosting weights to try, natural log, >= 0; used if phrases are given.
    boosting_weight: list[float] = field(default_factory=lambda: [0.0, 0.5, 1.0, 2.0])
    # Beam sizes to try.
    beam_size: list[int] = field(default_factory=lambda: [8])
    # Preset whose other options are used: a YAML file, or the name of a shipped one. null: the shipped
    # one that fits lm and phrases.
    preset: str | None = None
    # What is best: wer, or fscore (of the phrases; the lower WER breaks ties).
    objective: str = "wer"
    # Write the best combination here, as a preset for `transcribe preset=...`.
    out: str | None = None
    # Combinations shown, best first.
    show: int = 20
    # Utterances per batch of the encoder.
    batch_size: int = 8
    # Where the encoder runs: auto, cpu, cuda, cuda:1 ...
    device: str = "auto"
    # How log-probs are kept between decodings: float32, or float16 for half the memory.
    store: str = "float32"
    # Show NeMo's own messages.
    verbose: bool = False

    def __post_init__(self) -> None:
        for name in ("lm_weight", "beam_beta", "boosting_weight", "beam_size"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, expected values to try, such as {name}=[1,2]")
        if self.store not in STORES:
            raise ValueError(f"store is {self.store!r}, expected {' or '.join(STORES)}")
        if self.objective not in ("wer", "fscore"):
            raise ValueError(f"objective is {self.objective!r}, expected wer or fscore")
        if self.objective == "fscore" and self.phrases is None:
            raise ValueError("objective is 'fscore', which needs phrases=FILE")


OPTIONS = TuneOptions


@dataclass(frozen=True)
class Point:
    """One combination of the grid."""

    beam_size: int
    beam_beta: float
    lm_weight: float | None  # None: no LM
    boosting_weight: float | None  # None: no phrases


@dataclass(frozen=True)
class Trial:
    """One combination with its result."""

    point: Point
    decoded: Decoded
    score: Score


def run(options: TuneOptions) -> int:
    """Decode the dev set with every combination; table to stdout, best preset to `out`."""
    utterances = read_manifest(Path(options.manifest))
    phrases = load_phrase_file(options.phrases)
    files = {"lm": options.lm, "phrases": options.phrases}
    # with a weight of 0 LM or phrases would not be loaded; the weights are set per point of the grid
    loaded = {**files, "lm_weight": 1.0, "boosting_weight": 1.0}
    config = decoding_config("flexctc_beam", options.preset, loaded)

    from nemo_gpu_decoding.cli.dev_set import encode
    from nemo_gpu_decoding.nemo_plugin.session import Session

    session = Session.load(options.model, device=options.device, verbose=options.verbose)
    dev = encode(session, utterances, batch_size=options.batch_size, dtype=options.store)
    decoder = session.beam_decoder(config)
    points = list(grid(options, has_lm=options.lm is not None, has_phrases=bool(phrases)))
    trials = ranked(try_points(session, dev, decoder, points, phrases), options.objective)
    print(report(dev, trials, phrases, options.show))
    best = trials[0].point
    print(f"best: {describe(best)}")
    if options.out:
        preset = decoding_config("flexctc_beam", options.preset, {**files, **vars(best)})
        write_preset(Path(options.out), preset, preset_comment(options, trials[0]))
        print(f"written to {options.out}; use it with  transcribe preset={options.out}")
    return 0


def grid(options: TuneOptions, *, has_lm: bool, has_phrases: bool) -> Iterator[Point]:
    """All combinations; without LM or phrases their weights are left out."""
    lm_weights: Sequence[float | None] = options.lm_weight if has_lm else [None]
    boosting_weights: Sequence[float | None] = options.boosting_weight if has_phrases else [None]
    combinations = itertools.product(options.beam_size, options.beam_beta, lm_weights, boosting_weights)
    return itertools.starmap(Point, combinations)


def try_points(
    session: Session,
    dev: DevSet,
    decoder: FlexCTCBeam,
    points: Sequence[Point],
    phrases: Sequence[str],
) -> list[Trial]:
    """Decode the dev set once per point, with the LM and the tree that `decoder` has."""
    from tqdm import tqdm

    trials = []
    for point in tqdm(points, unit="point", desc="grid", disable=None, file=sys.stderr):
        decoded = dev.decode(at_point(decoder, point), session.text_of)
        trials.append(Trial(point, decoded, dev.score(decoded.texts, phrases)))
    return trials


def at_point(decoder: FlexCTCBeam, point: Point) -> FlexCTCBeam:
    """The same decoder with other weights; LM and boosting tree are shared, not loaded again."""
    config = replace(
        decoder.config, beam_size=point.beam_size, beam_beta=point.beam_beta,
        n_best=min(decoder.config.n_best, point.beam_size),
    )  # fmt: skip
    fusion = replace(
        decoder.fusion,
        lm=None if point.lm_weight is None else decoder.fusion.lm,
        lm_weight=point.lm_weight or 0.0,
        boosting=None if point.boosting_weight is None else decoder.fusion.boosting,
        boosting_weight=point.boosting_weight or 0.0,
    )
    return type(decoder)(decoder.vocab_size, decoder.blank_id, config, fusion)


def ranked(trials: Sequence[Trial], objective: str) -> list[Trial]:
    """Best first; ties go to the smaller beam, then to the smaller weights."""

    def key(trial: Trial) -> tuple:
        point, score = trial.point, trial.score
        fscore = score.phrases.fscore if score.phrases else 0.0
        quality = (-fscore, score.errors.wer) if objective == "fscore" else (score.errors.wer, -fscore)
        weights = (point.lm_weight or 0.0, point.boosting_weight or 0.0, abs(point.beam_beta))
        return (*quality, point.beam_size, *weights)

    return sorted(trials, key=key)


def report(dev: DevSet, trials: Sequence[Trial], phrases: Sequence[str], show: int) -> str:
    """Greedy and the best trials, one line each; WER in percent of the reference words."""
    header = ["decoder", "K", "lm_weight", "beam_beta", "boosting", "WER %", "sub", "del", "ins"]
    header += ["precision", "recall", "F-score"] if phrases else []
    rows = [["greedy", "", "", "", "", *score_cells(dev.score(dev.greedy_texts, phrases))]]
    for trial in trials[:show]:
        point = trial.point
        weights = [point.beam_size, point.lm_weight, point.beam_beta, point.boosting_weight]
        rows.append(["beam", *("" if w is None else w for w in weights), *score_cells(trial.score)])
    hidden = len(trials) - show
    note = [f"({hidden} more combinations; show={len(trials)} lists them all)"] if hidden > 0 else []
    return "\n".join([format_table(header, rows), *note])


def score_cells(score: Score) -> list[Any]:
    errors, found = score.errors, score.phrases
    cells = [f"{100 * errors.wer:.2f}", errors.substitutions, errors.deletions, errors.insertions]
    return cells + ([f"{v:.3f}" for v in (found.precision, found.recall, found.fscore)] if found else [])


def describe(point: Point) -> str:
    """The point as one would type it."""
    return " ".join(f"{name}={value}" for name, value in vars(point).items() if value is not None)


def preset_comment(options: TuneOptions, trial: Trial) -> str:
    fscore = f", phrase F-score {trial.score.phrases.fscore:.3f}" if trial.score.phrases else ""
    return (
        f"Found by `nemo-gpu-decoding tune` on {Path(options.manifest).name}: "
        f"WER {100 * trial.score.errors.wer:.2f} %{fscore}.\n"
        "Paths are relative to this file."
    )


def load_phrase_file(path: str | None) -> list[str]:
    """Phrases of the list file that an option names; none if there is no such option."""
    if path is None:
        return []
    from nemo_gpu_decoding.fusion.boosting import read_phrases  # what the decoder itself reads them with

    return [phrase.text for phrase in read_phrases(existing_file("phrases", path))]
