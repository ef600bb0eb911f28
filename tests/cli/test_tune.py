"""`tune`: the grid, the ranking, and one small run that ends in a preset that `transcribe` takes."""

import sys
from importlib.util import find_spec

import pytest
from omegaconf import OmegaConf

from nemo_gpu_decoding.cli import dev_set, tune
from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.cli.dev_set import Score
from nemo_gpu_decoding.cli.grid import Point, at_point, later_stages, points_of, varied
from nemo_gpu_decoding.cli.main import main
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cli.tune import Trial, TuneOptions, ranked
from nemo_gpu_decoding.cli.tune_plot import best_by, draw, options_of_panels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.metrics import PhraseScore, WordErrors, measure, right_words
from nemo_gpu_decoding.presets import load_preset
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from tests.random_models import random_lm as token_lm
from tests.random_models import random_log_probs
from tests.search.transducer.lstm import lstm_networks
from tests.search.word_graph.models import VOCAB, make_paged, random_lm


def options(*arguments):
    return parse_options(TuneOptions, ["model=m", "manifest=dev.json", *arguments])


def grid(options, strategy="flexctc_beam", has_lm=True, has_phrases=True):
    return points_of(options, strategy, has_lm=has_lm, has_phrases=has_phrases)


def trial(wrong, found=0, false=0, **point):
    values = {"beam_size": 8, "beam_beta": 0.0, "lm_weight": 0.5, "boosting_weight": None, **point}
    return Trial(Point(**values), Score(WordErrors(10, wrong, 0, 0), PhraseScore(found, false, 4 - found)))


def test_the_grid_has_every_combination():
    small = options("lm_weight=[0,1]", "beam_beta=[0,1,2]", "boosting_weight=[1]", "beam_size=[4,8]")
    points = grid(small)
    assert len(set(points)) == len(points) == 12
    assert Point(4, 2.0, 1.0, 1.0, segmentations=1) in points
    small = options("lm_weight=[0,1]", "beam_beta=[0]", "boosting_weight=[1,2]")
    assert grid(small, has_lm=False, has_phrases=False) == [Point(8, 0.0, None, None)]


def test_ranked_by_errors_phrases_and_size():
    worst, fewer_phrases = trial(3, 4), trial(1, 1)
    large, small = trial(1, 2, beam_size=16), trial(1, 2, lm_weight=0.7)
    smaller = trial(1, 2, lm_weight=0.2)
    order = ranked([worst, large, small, fewer_phrases, smaller], "wer")
    assert order == [smaller, small, large, fewer_phrases, worst]
    accurate, finds_names = trial(1, 1), trial(3, 4)
    assert ranked([accurate, finds_names], "fscore") == [finds_names, accurate]


def test_report_names_the_command_for_missed_phrases():
    dev = dev_set.DevSet((), ("gdansk",), ("gdansk",), 1.0)
    for found in (3, 4):
        shown = tune.report(dev, [trial(1, found=found)], ["gdansk"], 1)
        assert ("(1 phrases missed; nemo-gpu-decoding aliases" in shown) == (found == 3)


def test_report_names_phrases_and_an_lm_that_the_dev_set_cannot_tune():
    dev = dev_set.DevSet((), ("gdansk",), ("gdansk",), 1.0)
    useless = Trial(Point(8, 0.0, 0.0, 0.5), Score(WordErrors(10, 1, 0, 0), PhraseScore(0, 0, 0)))
    for best, is_useful in ((useless, False), (trial(1, found=4, lm_weight=0.2), True)):
        shown = tune.report(dev, [best], ["gdansk"], 1)
        assert ("no phrase occurs in the references" in shown) != is_useful
        assert ("the best LM weight is 0" in shown) != is_useful


@pytest.mark.parametrize(("reference", "is_other"), [("A B C", True), ("a b c", False), ("x y c", False)])
def test_report_names_another_letter_case_of_the_references(reference, is_other):
    shown = tune.report(dev_set.DevSet((), (reference,), ("a b c",), 1.0), [trial(1)], ["a"], 1)
    assert ("(the letter case of the references is not the model's; without case WER 0.00 %)" in shown) == is_other


def test_ranked_counts_false_phrases():
    careful, eager = trial(5, 2), trial(2, 4, false=2)
    assert ranked([eager, careful], "wer")[0] is careful  # 5 against 2 + 2 * 2.0
    assert ranked([eager, careful], "wer", false_phrase_cost=1.0)[0] is eager
    assert ranked([eager, careful], "wer", false_phrase_cost=0.0)[0] is eager
    assert ranked([eager, careful], "fscore")[0] is eager  # precision has false phrases already


def test_more_false_phrases_than_the_limit_rank_last():
    clean, one, two = trial(9), trial(5, 2, false=1), trial(2, 4, false=2)
    assert ranked([two, one, clean], "fscore", most_false=1.5) == [one, clean, two]
    assert ranked([one, two], "wer", most_false=0.0) == [one, two]  # the fewest, where none is within the limit


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("objective=cer", "objective is 'cer', expected one of wer, fscore"),
        ("objective=fscore", "needs phrases=FILE"),
        ("strategy=beam", "strategy is 'beam', expected one of flexctc_beam, cuda_wfst, paged_biglm, alsd_pp, aes_pp"),
        ("rescore=gpt2", "rescore=gpt2 orders n_best hypotheses; n_best is 1, expected >= 2"),
        ("n_best=4", "n_best is 4, which needs rescore=FILE"),
        ("source_lm_weight=[0.1]", "source_lm_weight is [0.1], which needs source_lm=FILE"),
        ("source_lm=a.arpa", "source_lm is 'a.arpa', which is subtracted from an LM, expected lm=FILE"),
        ("pruning_mode=[soon,late]", "pruning_mode is 'soon', expected one of late, early"),
        ("false_phrase_cost=-1", "false_phrase_cost is -1.0, expected a finite number >= 0"),
        ("false_phrases_per_hour=1", "false_phrases_per_hour is 1.0, which needs phrases=FILE"),
        ("beam_size=[4,0]", "beam_size is 0, expected an integer 1 .. 4096"),
        ("ac_threshold=2", "ac_threshold is 2.0, expected a number in [0, 1]"),
        ("plot=best.gif", "plot is 'best.gif', expected a file that ends in .png, .svg, .pdf"),
        ("plot=no/such/best.png", "plot=no/such/best.png: there is no folder no/such"),
    ],
)
def test_bad_options_are_refused(argument, problem, capsys):
    assert main(["tune", "model=m", "manifest=m", argument]) == 2
    assert problem in capsys.readouterr().err


def test_words_are_mapped_by_maps_of_other_utterances(monkeypatch):
    monkeypatch.setattr(dev_set.metrics, "fit_map", lambda confidences, rights: set(confidences))
    monkeypatch.setattr(dev_set.metrics, "calibrated", lambda values, fitted: [(c, c in fitted) for c in values])
    words = [([n, n + 0.5], [True, False]) for n in range(2 * dev_set.FOLDS + 1)]
    mapped = [pair for pairs, _ in dev_set._held_out(words) for pair in pairs]
    assert sorted(mapped) == [(c, False) for confidences, _ in words for c in confidences]


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "best").mkdir()
    assert main(["tune", "model=m", "manifest=m", "out=~/best"]) == 2
    assert "best is a folder, expected a file to write" in capsys.readouterr().err


def test_an_empty_phrase_list_is_refused(manifest, tmp_path, capsys):
    (tmp_path / "none.txt").write_text("\n\n")
    assert main(["tune", "model=m.nemo", f"manifest={manifest}", f"phrases={tmp_path}/none.txt"]) == 2
    assert "has no phrases" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nemo
def test_tune_prints_a_table_and_writes_a_preset(assets, manifest, tmp_path, capsys):
    pytest.importorskip("nemo.collections.asr")
    best = tmp_path / "best.yaml"
    arguments = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", f"out={best}", "show=2"]
    arguments += [f"lm={assets}/lm/tok3.arpa", f"phrases={assets}/phrases.txt", "store=float16"]
    arguments += ["lm_weight=[0,0.7]", "beam_beta=[1.0]", "boosting_weight=[0,1]", "beam_size=[4]"]
    assert main(["tune", *arguments]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out.splitlines()[2]
    assert out.count("\nbeam") == 2
    # both weights, then 8 segmentations with the best
    assert "(3 more combinations; show=5 lists them all)" in out
    preset = load_preset(str(best))
    assert preset.strategy == "flexctc_beam"
    beam = preset.beam
    values = beam.beam_size, beam.beam_beta, beam.ngram_lm_alpha, beam.boosting_tree_alpha
    point = Point(*values, segmentations=beam.boosting_tree.segmentations)
    tried = "beam_size=4 beam_beta=1.0 lm_weight=0.0,0.7 boosting_weight=0.0,1.0 segmentations=1,8"
    assert f"\nbest: {point}\ntried: {tried}\n" in out
    assert point._replace(segmentations=1) in grid(options(*arguments[4:]))
    assert f"\nword error rates over the weights: {tmp_path}/best.png\n" in out
    assert (tmp_path / "best.png").read_bytes().startswith(b"\x89PNG")

    transcribe = [f"model={assets}/models/self_ctc.nemo", f"manifest={manifest}", f"preset={best}"]
    assert main(["transcribe", *transcribe]) == 0
    assert "WER" in capsys.readouterr().err


# --------------------------------------------------------------------------- the picture of the grid
@pytest.mark.slow
def test_plot_shows_the_best_trial_of_each_value(tmp_path):
    pytest.importorskip("matplotlib")
    trials = ranked(
        [
            trial(round(3 + 2 * abs(weight - 0.5) + (beta == 0)), 2, lm_weight=weight, beam_beta=beta, beam_size=size)
            for weight in (0.0, 0.5, 1.5)
            for beta in (0.0, 1.0)
            for size in (4, 8)
        ],
        "wer",
    )  # fmt: skip
    assert options_of_panels(trials) == ["lm_weight", "beam_beta", "beam_size"]
    by_weight = best_by(trials, "lm_weight")
    assert {value: best.score.errors.total for value, best in by_weight.items()} == {0.5: 3, 0.0: 4, 1.5: 5}
    assert best_by(trials, "beam_beta", "lm_weight")[0.0, 1.5].score.errors.total == 6
    for greedy in (trials[-1].score, Score(WordErrors(10, 9, 0, 0), None)):
        draw(trials, greedy, tmp_path / "grid.svg")
        picture = (tmp_path / "grid.svg").read_text()
        assert picture.count('id="axes_') >= 4  # the map and three curves
        assert picture.count("<!-- 40.0 -->") >= 1  # WER in a cell
        assert f"<!-- best: {trials[0].point} -->" in picture
    with pytest.raises(ValueError, match="trials hold 1 points alike"):
        draw(trials[:1], trials[0].score, tmp_path / "grid.svg")


@pytest.mark.slow
def test_plot_draws_options_that_are_words(tmp_path):
    pytest.importorskip("matplotlib")
    trials = [trial(wrong, lm_weight=0.1 * wrong, beam_beta=float(wrong), pruning_mode=mode, score_norm=wrong > 1)
              for wrong, mode in ((1, "late"), (2, "early"))]  # fmt: skip
    draw(trials, trials[-1].score, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 5000
    head = (tmp_path / "grid.png").read_bytes()[16:24]
    width, height = (int.from_bytes(head[at : at + 4], "big") for at in (0, 4))
    assert (width, height) == (4 * 4.2 * 110, 2 * 3.8 * 110)  # five panels


def test_without_matplotlib_tune_says_so(monkeypatch, manifest, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    install = "pip install 'nemo-gpu-decoding[plot]'"
    assert main(["tune", "model=nowhere.nemo", f"manifest={manifest}", "plot=best.png"]) == 2
    assert f"matplotlib is not installed: {install}" in capsys.readouterr().err
    assert tune.plot_file(options("out=best.yaml")) is None
    assert f"no picture of the error rates without matplotlib: {install}" in capsys.readouterr().err
    assert tune.plot_file(options()) is None
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nemo
def test_tune_transducer_with_both_blank_scoring_modes(assets, manifest, tmp_path, capsys):
    pytest.importorskip("nemo.collections.asr")
    model, best = f"model={assets}/models/self_hybrid_rnnt.nemo", tmp_path / "best.yaml"
    arguments = [model, f"manifest={manifest}", f"lm={assets}/lm/tok3.arpa", "strategy=alsd_pp"]
    arguments += ["lm_weight=[0.2,0.9]", "beam_size=[4]", "pruning_mode=[early]", f"out={best}"]
    arguments += [f"source_lm={assets}/lm/tok6.arpa", "source_lm_weight=[0.1]"]
    assert main(["tune", *arguments]) == 0
    out = capsys.readouterr().out
    assert "pruning_mode" in out.splitlines()[0]
    assert min(out.count(" no_score "), out.count(" lm_weighted_full ")) >= 4  # two LM weights, two bonuses
    preset = load_preset(str(best))
    assert preset.strategy == "alsd_pp"
    assert preset.beam.blank_lm_score_mode in ("no_score", "lm_weighted_full")
    assert preset.beam.pruning_mode == "early"
    assert preset.beam.source_lm_alpha == 0.1
    assert preset.beam.source_lm_model.endswith("tok6.arpa")
    assert main(["transcribe", model, f"manifest={manifest}", f"preset={best}"]) == 0
    assert "WER" in capsys.readouterr().err


def test_grid_of_transducers_without_fusion_has_no_bonus():
    small = options("lm_weight=[0.5]", "beam_beta=[0,1]", "blank_lm_score_mode=[no_score,lm_weighted_full]")
    pairs = [(point.beam_beta, point.blank_lm_score_mode) for point in grid(small, "alsd_pp", has_phrases=False)]
    assert pairs == [(beta, mode) for beta in (0.0, 1.0) for mode in ("no_score", "lm_weighted_full")]
    assert {point.beam_beta for point in grid(options(), "alsd_pp", has_phrases=False)} == {0.0, 1.0}
    assert grid(options(), "alsd_pp", has_lm=False, has_phrases=False) == [Point(8, None, None, None)]
    with pytest.raises(ValueError, match="has no effect with alsd_pp without lm or phrases"):
        grid(small, "alsd_pp", has_lm=False, has_phrases=False)


def test_grid_has_the_given_pruning_modes():
    small = options("lm_weight=[0.5]", "beam_beta=[0]", "blank_lm_score_mode=[no_score]", "pruning_mode=[late,early]")
    assert [point.pruning_mode for point in grid(small, "aes_pp", has_phrases=False)] == ["late", "early"]
    assert {point.pruning_mode for point in grid(options(), "aes_pp")} == {None}
    with pytest.raises(ValueError, match="no effect with alsd_pp without lm or phrases"):
        grid(small, "alsd_pp", has_lm=False, has_phrases=False)
    with pytest.raises(ValueError, match=r"pruning_mode is \['late', 'early'\], which has no effect with f"):
        grid(options("pruning_mode=[late,early]"), "flexctc_beam")


def test_grid_tries_plain_scores_only_with_a_bonus():
    chosen = options("lm_weight=[0.2,0.4,0.6,0.8]", "beam_beta=[0,1,2]", "blank_lm_score_mode=[no_score]")
    points = grid(chosen, "alsd_pp", has_phrases=False)
    assert {point.score_norm for point in points} == {True}
    (stage,) = later_stages(chosen, "alsd_pp", points, has_phrases=False)
    tried = stage(next(point for point in points if point.lm_weight == 0.4 and not point.beam_beta))
    expected = [(weight, bonus, False) for weight in (0.2, 0.4, 0.6) for bonus in (1.0, 2.0)]
    assert [(point.lm_weight, point.beam_beta, point.score_norm) for point in tried] == expected
    points = grid(chosen, "alsd_pp", has_lm=False)
    stage, *others = later_stages(chosen, "alsd_pp", points, has_phrases=True)
    assert len(others) == 1
    assert [(point.lm_weight, point.beam_beta) for point in stage(points[0])] == [(None, 1.0), (None, 2.0)]
    named = options("score_norm=[true,false]", "beam_beta=[0]", "lm_weight=[0.5]", "blank_lm_score_mode=[no_score]")
    points = grid(named, "aes_pp", has_phrases=False)
    assert [point.score_norm for point in points] == [True, False]
    assert later_stages(named, "aes_pp", points, has_phrases=False) == []
    assert {point.score_norm for point in grid(options("beam_beta=[0]"), "aes_pp")} == {None}
    with pytest.raises(ValueError, match=r"score_norm is \[True, False\], which has no effect with f"):
        grid(options("score_norm=[true,false]"), "flexctc_beam")


def test_at_point_sets_score_norm():
    decoder = ALSDPlusPlus(lstm_networks(VOCAB), fusion=Fusion(token_lm(VOCAB, seed=1)))
    for score_norm in (True, False):
        assert at_point(decoder, Point(lm_weight=0.5, score_norm=score_norm)).config.score_norm is score_norm
    best = Point(beam_beta=1.0, lm_weight=0.5, score_norm=False)
    assert decoding_config("alsd_pp", None, best._asdict()).beam.score_norm is False
    assert best.cost > best._replace(score_norm=True).cost


def test_grid_has_source_lm_weights():
    given = options("lm=a", "source_lm=b", "lm_weight=[0,0.5]", "source_lm_weight=[0.1,0.3]", "beam_beta=[0]")
    pairs = [(point.lm_weight, point.source_lm_weight) for point in grid(given, has_phrases=False)]
    assert pairs == [(0.0, 0.0), (0.5, 0.1), (0.5, 0.3)]
    assert {point.source_lm_weight for point in grid(options("lm=a", "source_lm=b"))} == {0.0, 0.1, 0.2, 0.3, 0.4}
    assert {point.source_lm_weight for point in grid(options("lm=a"))} == {None}


def test_at_point_sets_the_density_ratio():
    lm, source = token_lm(VOCAB, seed=1), token_lm(VOCAB, seed=2)
    decoder = FlexCTCBeam(VOCAB, VOCAB, fusion=Fusion(lm, source_lm=source, source_lm_weight=1.0))
    point = Point(beam_size=4, lm_weight=0.5, source_lm_weight=0.2)
    score = lm.score([1, 2]) - 0.4 * source.score([1, 2])
    assert at_point(decoder, point).fusion.token_lm.score([1, 2]) == pytest.approx(score, abs=1e-5)
    assert at_point(decoder, point._replace(source_lm_weight=0.0)).fusion.token_lm is lm
    assert at_point(decoder, point._replace(lm_weight=0.0)).fusion.token_lm is lm


def test_grid_has_large_lm_weights():
    small = options("lm_weight=[0.7]", "large_lm_weight=[0.5,1]", "beam_width=[12]")
    points = grid(small, "paged_biglm", has_phrases=False)
    assert points == [Point(lm_weight=0.7, beam_width=12.0, large_lm_weight=w) for w in (0.5, 1.0)]
    assert {point.large_lm_weight for point in grid(options(), "paged_biglm")} == {0.5, 1.0}
    assert {point.large_lm_weight for point in grid(options(), "cuda_wfst")} == {None}
    with pytest.raises(ValueError, match=r"large_lm_weight is \[0.5, 1.0\], .* no effect with cuda_wfst"):
        grid(small, "cuda_wfst")


def test_grid_of_word_graphs_has_beam_widths():
    small = options("lm_weight=[0.5,1]", "beam_width=[12]")
    points = grid(small, "cuda_wfst", has_lm=False, has_phrases=False)
    assert points == [Point(lm_weight=w, beam_width=12.0) for w in (0.5, 1.0)]
    assert varied(points) == ["lm_weight", "beam_width"]
    listed = grid(options("lm_weight=[0.5,1]", "boosting_weight=[0,10]", "beam_width=[12,20]"), "cuda_wfst")
    assert len(set(listed)) == 8
    with pytest.raises(ValueError, match=r"beam_width is \[12.0\], which has no effect with alsd_pp"):
        grid(small, "alsd_pp")
    with pytest.raises(ValueError, match=r"beam_size is \[4, 8\], which has no effect with cuda_wfst"):
        grid(options("beam_size=[4,8]"), "cuda_wfst")


# ------------------------------------------------------------------ what is null is tried in stages
def stages(options, strategy, most_bonus=0.0):
    points = points_of(options, strategy, has_lm=True, has_phrases=True, most_bonus=most_bonus)
    return points, later_stages(options, strategy, points, has_phrases=True, most_bonus=most_bonus)


@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp", "aes_pp"])
def test_second_stage_tries_larger_beams_and_segmentations(strategy):
    points, (*_, larger) = stages(options(), strategy)
    assert {(point.beam_size, point.segmentations) for point in points} == {(8, 1)}
    weights = {point.boosting_weight for point in points}
    assert {0.0, 0.25, 0.75} <= weights  # single tokens want little
    best = points[-1]
    more = larger(best)
    boosted = {point for point in more if point.boosting_weight > 0}
    assert boosted == {
        best._replace(beam_size=size, segmentations=n, boosting_weight=weight)
        for size in (8, 32) for n in (1, 8) for weight in weights - {0.0}
    }  # fmt: skip
    assert {point.segmentations for point in set(more) - boosted} == {1}  # without a bonus all are the same
    assert len(more) < len(points) / 2


def test_grid_combines_listed_beam_sizes_and_segmentations():
    points, (*_, larger) = stages(options("beam_size=[4,16]", "segmentations=[2,3]", "lm_weight=[0.5,1]"), "alsd_pp")
    assert {(point.beam_size, point.segmentations) for point in points} == {(4, 2), (4, 3), (16, 2), (16, 3)}
    assert set(larger(points[0])) <= set(points)
    _, (*_, larger) = stages(options("beam_size=[4]"), "flexctc_beam")
    assert {(point.beam_size, point.segmentations) for point in larger(points[0])} == {(4, 1), (4, 8)}


@pytest.mark.parametrize("strategy", ["alsd_pp", "cuda_wfst"])
def test_last_stage_tries_thresholds(strategy):
    limited = options("boosting_weight=[0,5,10,20]", "false_phrases_per_hour=1", "phrases=names.txt")
    points, (*_, heard) = stages(limited, strategy, most_bonus=1.0)
    best = points[0]._replace(boosting_weight=10.0)
    tried = heard(best)
    assert {point.boosting_weight for point in tried} == {10.0, 20.0}
    assert {point.ac_threshold for point in tried} == {0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03}
    assert heard(best._replace(boosting_weight=0.0)) == []
    listed = stages(options("boosting_weight=[5,10]", "ac_threshold=[0.5]"), strategy)[1][-1](best)
    assert [point.ac_threshold for point in listed] == [0.5]
    if strategy == "cuda_wfst":
        assert {point.beam_width for point in tried} == {40.0}  # of which 20 is half
    with pytest.raises(ValueError, match=r"ac_threshold is \[0.5\], which has no effect"):
        grid(options("ac_threshold=[0.5]"), strategy, has_phrases=False)


def test_without_phrases_there_is_one_beam_size_and_no_second_stage():
    points = grid(options(), has_phrases=False)
    assert {(point.beam_size, point.segmentations) for point in points} == {(8, None)}
    assert later_stages(options(), "flexctc_beam", points, has_phrases=False) == []
    with pytest.raises(ValueError, match=r"segmentations is \[8\], which has no effect with flexctc_beam"):
        grid(options("segmentations=[8]"), has_phrases=False)
    with pytest.raises(ValueError, match=r"segmentations is \[8\], which has no effect with cuda_wfst"):
        grid(options("segmentations=[8]"), "cuda_wfst")


def test_stages_of_word_graphs_try_lm_then_boosting_weights():
    points, (boosted, neighbours) = stages(options(), "paged_biglm", most_bonus=1.0)
    assert len(points) == 10
    assert {(point.boosting_weight, point.beam_width) for point in points} == {(0.0, 16.0)}
    best = points[0]._replace(lm_weight=0.7, large_lm_weight=1.0)
    tried = boosted(best)
    assert {point._replace(boosting_weight=0.0, beam_width=16.0) for point in tried} == {best}
    widths = {point.boosting_weight: point.beam_width for point in tried}
    # half of a beam is more than a word earns, where one of the beams is that wide
    assert widths == {0.0: 16.0, 1.0: 16.0, 2.0: 16.0, 5.0: 16.0, 10.0: 40.0, 20.0: 40.0, 40.0: 40.0}
    best = best._replace(boosting_weight=10.0, beam_width=40.0)
    around = {best._replace(lm_weight=0.5), best._replace(lm_weight=1.0), best._replace(large_lm_weight=0.5)}
    assert set(neighbours(best)) == {best} | around
    least = best._replace(lm_weight=0.3)
    assert set(neighbours(least)) == {least} | {best._replace(lm_weight=0.5), least._replace(large_lm_weight=0.5)}
    wide = [point for point in (*points, *tried, *around) if point.beam_width == 40.0]
    assert len(wide) <= 6  # these take ten times as long, and of all combinations they would be half: 70


@pytest.mark.slow
@pytest.mark.nemo
def test_tune_word_graph_writes_a_preset(assets, manifest, tmp_path, capsys):
    pytest.importorskip("nemo.collections.asr")
    pytest.importorskip("kaldifst")
    model, best = f"model={assets}/models/self_ctc.nemo", tmp_path / "best.yaml"
    arguments = [model, f"manifest={manifest}", "strategy=cuda_wfst", f"lm={assets}/lm/word3.arpa"]
    arguments += [f"phrases={assets}/phrases.txt", "lm_weight=[0.7,1]", "boosting_weight=[0,10]", "n_best=4"]
    arguments += [f"rescore={assets}/lm/word_small.arpa", "rescore_weight=[0,0.3]"]
    assert main(["tune", *arguments, "beam_width=[20]", f"out={best}"]) == 0
    out = capsys.readouterr().out
    assert out.count("\nbeam") == 8
    assert "lm_weight  boosting_weight  beam_width  rescore_weight" in out
    preset = load_preset(str(best))
    assert preset.strategy == "cuda_wfst"
    assert preset.wfst.arpa_lm_path == str(assets / "lm" / "word3.arpa")
    assert preset.wfst.boosting_tree.key_phrases_file == str(assets / "phrases.txt")
    assert f"lm_weight={preset.wfst.lm_weight} boosting_weight={preset.wfst.boosting_tree_alpha}" in out
    assert main(["transcribe", model, f"manifest={manifest}", f"preset={best}"]) == 0
    assert "WER" in capsys.readouterr().err


# -------- A decoder at a point of the grid is the decoder that one would have made with these options
FRAMES = 30
needs_kaldifst = pytest.mark.skipif(find_spec("kaldifst") is None, reason="needs kaldifst")


def decoded(decoder):
    log_probs = random_log_probs(3, FRAMES, VOCAB + 1, seed=3)
    return [(n.best.text, n.best.score) for n in decoder.decode(log_probs, [FRAMES] * 3)]


@needs_kaldifst
def test_at_point_sets_both_lm_weights():
    lms = random_lm(1), random_lm(20, keep=0.8)
    decoder = make_paged(*lms, beam=20.0)
    first = decoded(decoder)
    at = decoded(at_point(decoder, Point(beam_width=12.0, lm_weight=0.5, large_lm_weight=0.25)))
    assert at == decoded(make_paged(*lms, beam=12.0, lm_weight=0.5, large_lm_weight=0.25)) != first
    assert decoded(at_point(decoder, Point())) == first == decoded(decoder)


def test_at_point_sets_n_best():
    decoder = FlexCTCBeam(4, 4)
    point = Point(beam_size=16)
    assert [at_point(decoder, point, n).config.n_best for n in (1, 3)] == [1, 16]


@needs_kaldifst
def test_at_point_sets_the_boosting_weight():
    decoder = make_paged(random_lm(1), random_lm(20, keep=0.8), beam=20.0)
    plain = decoded(decoder)
    boosting = build_word_boosting(dict.fromkeys(decoder.graph.words[1:3], 1.0), decoder.graph)
    decoder = decoder.with_options(decoder.config, Fusion(boosting=boosting))
    assert decoded(at_point(decoder, Point(boosting_weight=9.0))) != plain
    assert decoded(at_point(decoder, Point())) == plain


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["flexctc_beam", "cuda_wfst"])
def test_confidence_is_mapped_to_the_share_of_right_words(strategy, assets, tmp_path, capsys):
    import json

    pytest.importorskip("nemo.collections.asr")
    model, dev, out = (
        f"model={assets}/models/self_ctc.nemo",
        f"manifest={assets}/speech/dev.json",
        tmp_path / "best.yaml",
    )
    lm = [f"lm={assets}/lm/word3.arpa"] if strategy == "cuda_wfst" else []
    given = ["lm_weight=0.6", *lm] if lm else ["beam_beta=0", "beam_size=4"]
    assert main(["tune", model, dev, f"strategy={strategy}", *given, "confidence=min,prod", f"out={out}"]) == 0
    assert "mapped: ECE" in capsys.readouterr().out
    preset = load_preset(str(out))
    slope, _ = preset["wfst" if lm else "beam"].confidence_map
    assert slope > 0
    assert preset.confidence_cfg.aggregation in ("min", "prod")
    assert main(["transcribe", model, dev, f"preset={out}", "timestamps=true", f"out={tmp_path}/hyps.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "hyps.jsonl").read_text().splitlines()]
    found, right = [], []
    for row in rows:
        oks = right_words(row["text"], [word["word"] for word in row["words"]])
        pairs = [(word["confidence"], ok) for word, ok in zip(row["words"], oks, strict=True)]
        found += [confidence for confidence, _ in pairs if confidence is not None]
        right += [ok for confidence, ok in pairs if confidence is not None]
    assert len(found) > 350
    assert measure(found, right).ece < 0.05


@pytest.mark.parametrize("value", ["[]", "[0.5]", "[-0.1,0]", "[.inf,0]", "[1,.nan]", "[1,2,3]", "[[0,1],[1,1]]", "3"])
def test_a_map_of_confidence_is_slope_and_intercept(value):
    pytest.importorskip("nemo.collections.asr")
    from nemo_gpu_decoding.nemo_plugin.beam_sections import read_flexctc

    cfg = OmegaConf.create(f"strategy: flexctc_beam\nbeam: {{beam_size: 4, confidence_map: {value}}}")
    with pytest.raises(ValueError, match=r"beam\.confidence_map is .*, expected .slope, intercept"):
        read_flexctc(cfg)
