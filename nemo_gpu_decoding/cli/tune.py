"""`nemo-gpu-decoding tune` searches for the best LM and boosting weights of a model on a dev set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from tqdm import tqdm

from nemo_gpu_decoding.audio import check_channel_selector
from nemo_gpu_decoding.checks import check_choice
from nemo_gpu_decoding.cli import decoding
from nemo_gpu_decoding.cli.dev_set import DevSet, Score, encode, with_confidence_map
from nemo_gpu_decoding.cli.grid import Point, Searches, at_point, later_stages, points_of, tried_values, varied
from nemo_gpu_decoding.cli.tune_plot import FORMATS, draw, options_of_panels
from nemo_gpu_decoding.extras import install_command, is_installed
from nemo_gpu_decoding.manifest import read_manifest, usable
from nemo_gpu_decoding.metrics import rate_name, word_errors
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.plain_text import format_table, path_of
from nemo_gpu_decoding.presets import load_preset, write_preset
from nemo_gpu_decoding.schema import option
from nemo_gpu_decoding.search.transducer.config import BLANK_LM_SCORE_MODES, PRUNING_MODES

EXAMPLES = (
    "model=model.nemo manifest=dev.json lm=lm.arpa out=best.yaml",
    "model=model.nemo manifest=dev.json lm=lm.arpa phrases=names.txt boosting_weight=[0.5,1,2]",
    "model=rnnt.nemo manifest=dev.json lm=lm.arpa strategy=alsd_pp out=best.yaml",
    "model=model.nemo manifest=dev.json lm=word.arpa strategy=cuda_wfst phrases=names.txt out=best.yaml",
    "model=model.nemo manifest=dev.json strategy=paged_biglm lm=small.arpa large_lm=large.packed",
    "model=rnnt.nemo manifest=dev.json lm=lm.arpa source_lm=source.arpa out=best.yaml",
    "model=model.nemo manifest=dev.json lm=lm.arpa lm_weight=[0.3,0.4,0.5] beam_size=[4,8,16]",
)
FIRST = ("model", "manifest", "out", "strategy", "lm", "lm_weight", "beam_beta", "phrases", "boosting_weight", "plot")
AGGREGATIONS = ("min", "mean", "prod")  # of NeMo's confidence_cfg
FALSE_PHRASE_COST = 2.0  # word errors


@decoding.with_options_of(decoding.SEARCHES.values(), listed=True)
@dataclass
class TuneOptions(decoding.ModelOptions):
    """Options of `tune`. An option may have a list of values; `tune` decodes the dev set with every combination. With
    phrases, options that are null are tried in stages, around the best combination so far."""

    topic = "values to try, and output"

    # NeMo manifest of the dev set: JSON lines with audio_filepath (relative to the manifest) and text. A line with
    # offset is a part of the file, duration seconds long.
    manifest: str = MISSING
    # LM weights to try, >= 0; used if there is an LM. null: 0 .. 1, for word graphs 0.3 .. 1.3.
    lm_weight: list[float] | None = option(None, low=0)
    # Weights of the source LM to try, >= 0; used if there is one, with LM weights above 0. null: 0 .. 0.4.
    source_lm_weight: list[float] | None = option(None, low=0, needs="source_lm=FILE")
    # For paged_biglm: shares of the large LM in lm_weight to try, >= 0. null: 0.5 and 1.
    large_lm_weight: list[float] | None = option(None, low=0)
    # Bonuses per token to try, natural log; for RNN-T and TDT used with an LM or phrases. null: for CTC 0 .. 1.5, for
    # RNN-T and TDT 0 and 1.
    beam_beta: list[float] | None = None
    # For RNN-T and TDT with an LM or phrases: how blanks are scored. With no_score the LM lowers the scores of tokens
    # only, so that a large weight deletes words. null: both.
    blank_lm_score_mode: list[str] | None = option(None, choices=BLANK_LM_SCORE_MODES)
    # For RNN-T and TDT with an LM or phrases: whether labels are pruned after fusion (late) or before it (early),
    # such as [late,early]. null: as in the preset.
    pruning_mode: list[str] | None = option(None, choices=PRUNING_MODES)
    # For RNN-T and TDT with an LM or phrases: whether final hypotheses are ranked by score per token. null: true, then
    # false with bonuses per token above 0, with the best LM weight and those next to it.
    score_norm: list[bool] | None = None
    # Boosting weights to try, natural log, >= 0; used if phrases are given. null: 0 .. 2. Word graphs count per word;
    # null: 0 .. 40 with the best LM weights, then the LM weights next to the best ones.
    boosting_weight: list[float] | None = option(None, low=0)
    # Beam sizes to try, 1 .. 4096; word graphs have none. null: 8; with phrases also 32 with the best weights.
    beam_size: list[int] | None = option(None, low=1, high=4096)
    # Numbers of token sequences to boost per phrase; word graphs have none. null: 1, then 8 with the best weights.
    segmentations: list[int] | None = option(None, low=1)
    # Least evidence of a phrase to try, 0 .. 1 (boosting_tree.ac_threshold), with the best weights. null: 0; with
    # false_phrases_per_hour 0 .. 0.03.
    ac_threshold: list[float] | None = option(None, low=0, high=1)
    # Most false phrases per hour of speech, >= 0: combinations with more rank last. Put speech without phrases into
    # the manifest. null: no limit.
    false_phrases_per_hour: float | None = option(None, low=0, needs="phrases=FILE")
    # For word graphs: beam widths to try, natural log, > 0. null: 16, or 40 if a word's bonus exceeds half of 16.
    beam_width: list[float] | None = option(None, above=0)
    # The measure to optimise: wer (with phrases: and their false_phrase_cost), or fscore of the phrases.
    objective: str = option("wer", choices=("wer", "fscore"), needs="phrases=FILE")
    # With the objective wer and phrases: word errors that a false phrase counts on top of its own errors, >= 0. 0: WER
    # alone. It gains from a large boosting weight that inserts phrases in place of words that are wrong anyway.
    false_phrase_cost: float = option(FALSE_PHRASE_COST, low=0)
    # Output file: the best combination, as a preset for `transcribe preset=...`.
    out: str | None = None
    # Hypotheses per utterance for the second pass, >= 2 and at most beam_size.
    n_best: int = option(1, low=1, needs="rescore=FILE")
    # LM that reorders the n_best hypotheses in a second pass: a word n-gram LM, as a file of pack-lm or ARPA.
    rescore: str | None = None
    # Weights of the second-pass LM to try, >= 0.
    rescore_weight: list[float] = option([0.2, 0.5, 1.0], low=0)
    # Factor of the first LM's scores in the second pass, >= 0; 0 drops them.
    rescore_lm_share: float = option(1.0, low=0, needs="rescore=FILE")
    # Output file for a plot of the error rates over the weights (.png, .svg or .pdf). null: the path of `out` with
    # the ending .png, if the extra plot is installed.
    plot: str | None = None
    # Number of combinations in the table, best first.
    show: int = 20
    # For files with several channels: average, or the number of the channel to decode, from 0. null: average, with a
    # warning.
    channel_selector: Any = None
    # Aggregations of token confidence to words to try: min, mean or prod. Fits a map of word confidence to the
    # probability that the word is right. `out` gets the map and the best aggregation. null: no map.
    confidence: list[str] | None = option(None, choices=AGGREGATIONS)
    # Type of the stored encoder output: float32, or float16 for half the memory.
    store: str = option("float32", choices=("float32", "float16"))

    def check_rules(self) -> None:
        decoding.check_rescoring(self)
        check_channel_selector(self.channel_selector)
        if self.source_lm is not None and self.lm is None:
            raise ValueError(f"source_lm is {self.source_lm!r}, which is subtracted from an LM, expected lm=FILE")
        if self.strategy is not None:
            check_choice("strategy", self.strategy, STRATEGIES)
        if self.plot is not None and Path(self.plot).suffix not in FORMATS:
            raise ValueError(f"plot is {self.plot!r}, expected a file that ends in {', '.join(FORMATS)}")
        for name in Point._fields:
            if getattr(self, name) == []:
                raise ValueError(f"{name} is empty, expected values to try, such as {name}=[1,2]")


OPTIONS = TuneOptions


@dataclass(frozen=True)
class Trial:
    """One combination of options with its word errors on the dev set."""

    point: Point
    score: Score


def run(options: TuneOptions) -> int:
    """Decode the dev set with every combination; print a table to stdout, write the best preset to `out`."""
    out = options.out and path_of(options.out)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        decoding.writable_file("out", str(out))
    plot = plot_file(options)
    utterances = usable(read_manifest(path_of(options.manifest)))
    recordings = [("manifest", utterance.path) for utterance in utterances]
    decoding.check_outputs(options, recordings, [("plot", plot)] if plot and not options.plot else [])
    phrases = decoding.load_phrase_file(options.phrases)
    decoding.check_weight("boosting_weight", options.boosting_weight, bool(phrases))
    files = {name: getattr(options, name, None) for name in decoding.FILES}  # tune has no grammar
    # a model with weight 0 would not be loaded; the weights are set per point of the grid
    loaded = {**files, "lm_weight": 1.0, "boosting_weight": 1.0}
    if options.source_lm:
        loaded["source_lm_weight"] = 1.0

    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device=options.device, verbose=options.verbose, channel=options.channel_selector)
    strategy = choose_strategy(options, model.default_head)
    has_lm = options.lm is not None or decoding.section_of(strategy) == "wfst"
    decoding.check_weight("lm_weight", options.lm_weight, has_lm)
    head = model.head_for(strategy)
    searches = Searches(head, strategy, options.preset, loaded)
    dev = encode(head, utterances, batch_size=options.batch_size, dtype=options.store)
    trials = search_points(options, strategy, searches, dev, phrases)
    print(report(dev, trials, phrases, options.show))
    best = trials[0].point
    print(f"best: {best}")
    print(f"tried: {tried_values([trial.point for trial in trials])}")
    preset = decoding.decoding_config(strategy, options.preset, {**files, **best._asdict()})
    if options.confidence:
        preset, shown = with_confidence_map(head, preset, utterances, options.confidence, options.batch_size)
        print(shown)
    if out:
        write_preset(out, preset, preset_comment(options, trials[0], rate_name(dev.references)))
        print(f"written to {options.out}; use it with  transcribe preset={options.out}")
    if plot is not None and options_of_panels(trials):
        draw(trials, dev.score(dev.greedy_texts, phrases), plot)
        print(f"word error rates over the weights: {plot}")
    return 0


def plot_file(options: TuneOptions) -> Path | None:
    """Return the path of the plot, or None if the options name no plot."""
    if options.plot is not None:
        return decoding.writable_file("plot", options.plot)
    if options.out is None:
        return None
    if not is_installed("matplotlib"):
        print(f"no picture of the error rates without matplotlib: {install_command('plot')}", file=sys.stderr)
        return None
    return path_of(options.out).with_suffix(".png")


def choose_strategy(options: TuneOptions, default_head: str) -> str:
    """Return the strategy to tune: the option `strategy`, else the preset's strategy, else the default of the head."""
    if options.strategy:
        return options.strategy
    if options.preset is None:
        return decoding.DEFAULT_STRATEGY[default_head]
    strategy = str(load_preset(options.preset).strategy)
    if strategy not in STRATEGIES:
        raise ValueError(f"preset has the strategy {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    return strategy


def search_points(
    options: TuneOptions, strategy: str, searches: Searches, dev: DevSet, phrases: Sequence[str]
) -> list[Trial]:
    """Decode the dev set with the points of all stages, and return the trials, best first."""
    in_graph = decoding.section_of(strategy) == "wfst"
    given: dict[str, Any] = {"has_phrases": bool(phrases), "most_bonus": searches.most_bonus if in_graph else 0.0}
    points = points_of(options, strategy, has_lm=options.lm is not None, **given)
    order = partial(ranked, objective=options.objective, false_phrase_cost=options.false_phrase_cost)
    trials = order(try_points(searches, dev, points, phrases, options))
    for stage in later_stages(options, strategy, points, **given):
        known = {trial.point for trial in trials}
        more = [point for point in stage(trials[0].point) if point not in known]
        trials = order([*trials, *try_points(searches, dev, more, phrases, options)])
    if options.false_phrases_per_hour is None:
        return trials
    return order(trials, most_false=options.false_phrases_per_hour * dev.audio_seconds / 3600)


def try_points(
    searches: Searches, dev: DevSet, points: Sequence[Point], phrases: Sequence[str], options: TuneOptions
) -> list[Trial]:
    """Decode the dev set once for each point, and return a trial per point."""
    from nemo_gpu_decoding.search.rescoring import Rescoring, load_scorer

    scorer = load_scorer(options.rescore) if options.rescore else None
    trials = []
    for point in tqdm(points, unit="point", desc="grid", disable=None, file=sys.stderr):
        second = Rescoring(scorer, point.rescore_weight or 0.0, options.rescore_lm_share) if scorer else None
        search = at_point(searches.at(point), point, options.n_best)
        texts = dev.decode(search, searches.head.text_of, second, options.n_best)
        trials.append(Trial(point, dev.score(texts, phrases)))
    return trials


def ranked(
    trials: list[Trial], objective: str, false_phrase_cost: float = FALSE_PHRASE_COST, most_false: float = float("inf")
) -> list[Trial]:
    """Sort the trials, best first; among equal trials, smaller beams and then smaller weights come first.

    Args:
        most_false: trials with more false phrases come last, those with the fewest first.
    """

    def key(trial: Trial) -> tuple:
        score = trial.score
        fscore = score.phrases.fscore if score.phrases else 0.0
        false = score.phrases.false_positives if score.phrases else 0
        errors = score.errors.total + false_phrase_cost * false
        quality = (-fscore, score.errors.total) if objective == "fscore" else (errors, -fscore)
        return (false if false > most_false else 0, *quality, *trial.point.cost)

    return sorted(trials, key=key)


def report(dev: DevSet, trials: Sequence[Trial], phrases: Sequence[str], show: int) -> str:
    """Return a table with greedy decoding and the best trials; WER is in percent of the reference words."""
    names = varied([trial.point for trial in trials])
    rate = rate_name(dev.references)
    header = ["decoder", *names, f"{rate} %", "sub", "del", "ins"]
    header += ["precision", "recall", "F-score", "false phrases"] if phrases else []
    greedy = dev.score(dev.greedy_texts, phrases)
    rows = [["greedy", *[""] * len(names), *score_cells(greedy)]]
    for trial in trials[:show]:
        values = [getattr(trial.point, name) for name in names]
        rows.append(["beam", *values, *score_cells(trial.score)])
    hidden = len(trials) - show
    note = [f"({hidden} more combinations; show={len(trials)} lists them all)"] if hidden > 0 else []
    if (found := trials[0].score.phrases) and found.false_negatives:
        note.append(
            f"({found.false_negatives} phrases missed; nemo-gpu-decoding aliases finds what is heard for them)"
        )
    if found and not (found.true_positives or found.false_negatives):
        note.append("(no phrase occurs in the references, so they do not tune the boosting weight)")
    if trials[0].point.lm_weight == 0:
        note.append("(the best LM weight is 0: the LM does not help on these references)")
    folded = word_errors(*([text.casefold() for text in texts] for texts in (dev.references, dev.greedy_texts)))
    if 2 * folded.total < greedy.errors.total:
        note.append(
            f"(the letter case of the references is not the model's; without case {rate} {100 * folded.wer:.2f} %)"
        )
    return "\n".join([format_table(header, rows), *note])


def score_cells(score: Score) -> list[Any]:
    errors, phrases = score.errors, score.phrases
    cells = [f"{100 * errors.wer:.2f}", errors.substitutions, errors.deletions, errors.insertions]
    if phrases:
        cells += [f"{v:.3f}" for v in (phrases.precision, phrases.recall, phrases.fscore)] + [phrases.false_positives]
    return cells


def preset_comment(options: TuneOptions, trial: Trial, rate: str = "WER") -> str:
    fscore = f", phrase F-score {trial.score.phrases.fscore:.3f}" if trial.score.phrases else ""
    return (
        f"Found by `nemo-gpu-decoding tune` on {Path(options.manifest).name}: "
        f"{rate} {100 * trial.score.errors.wer:.2f} %{fscore}.\n"
        "Paths are relative to this file."
    )
