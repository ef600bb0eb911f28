"""Published figures of GPU decoders, and ours beside them."""

import json
import re

import pytest

from benchmarks.options import BenchOptions
from benchmarks.published import NOT_MEASURED, figures, published_table, read_results, setting_of
from tests.assets import ROOT

PAPERS = ("FlexCTC", "ALSD++", "CUDA-WFST", "XLLM")


def result(peer="nemo_malsd", **changes):
    """A result with one row of alsd_pp, as the benchmarks write it."""
    row = {
        "strategy": "alsd_pp", "peer": peer, "task": "peaked-tdt", "networks": "tdt", "part": "end to end",
        "batch": 128, "params": {"beam_size": 6, "lm": False, "boosting": False}, "verified": True,
        "seconds": {"ours": 0.02, "peer": 0.04}, "rtfx": {"ours": 20000.0, "peer": 10000.0}, **changes,
    }  # fmt: skip
    options = {"encoder_precision": "float16", "max_frames": 375}
    return {"mode": "batch", "strategy": "alsd_pp", "options": options, "rows": [row]}


def cells(results, source, published):
    """The two last cells of the line of a figure."""
    (line,) = [line for line in published_table(results).splitlines() if line.startswith(source) and published in line]
    return re.split(r"  +", line.strip())[-2:]


def test_figure_has_ours_beside_it_where_the_setting_is_the_same():
    assert cells([result()], "fast-gpu-asr", " 10412 ") == ["20000 (peaked-tdt)", NOT_MEASURED]
    assert cells([result()], "fast-gpu-asr", " 12353 ") == [NOT_MEASURED, NOT_MEASURED]  # another batch
    table = published_table([result()], "cuda_wfst")
    assert "CUDA-WFST" in table
    assert "fast-gpu-asr" not in table


@pytest.mark.parametrize("changes", [
    {"verified": False}, {"seconds": {"ours": None, "peer": None}}, {"part": "decoder"}, {"networks": "rnnt"},
    {"params": {"beam_size": 6, "lm": True, "boosting": False}},
])  # fmt: skip
def test_row_of_another_setting_or_without_a_verified_figure_is_not_shown(changes):
    assert cells([result(**changes)], "fast-gpu-asr", " 10412 ") == [NOT_MEASURED, NOT_MEASURED]


def test_published_decoder_that_was_measured_again_has_its_own_cell():
    of_the_paper = {"batch": 32}
    assert cells([result(**of_the_paper)], "ALSD++, table 1", " 2495 ") == ["20000 (peaked-tdt)", "10000 (peaked-tdt)"]
    assert cells([result("nemo_greedy", **of_the_paper)], "ALSD++, table 1", " 2495 ")[1] == NOT_MEASURED


def test_figures_name_settings_that_rows_have():
    known = set(setting_of(result(), result()["rows"][0]))
    for table, figure in figures():
        assert {"source", "gpu", "unit", "setting", "strategy", "figures"} <= set(table) <= {
            "source", "gpu", "unit", "setting", "strategy", "figures", "peer", "row",
        }  # fmt: skip
        assert {*table.get("row", {}), *figure} - {"value"} <= known
    assert set(BenchOptions().transducers) == {
        {**table.get("row", {}), **figure}["networks"] for table, figure in figures() if table["strategy"] == "alsd_pp"
    }


def test_figures_of_papers_are_those_of_their_page():
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    numbers = {float(number) for number in re.findall(r"\d*\.?\d+", page)}
    seen = [(table["source"], figure["value"]) for table, figure in figures() if table["source"].startswith(PAPERS)]
    assert {source.partition(",")[0] for source, _ in seen} == set(PAPERS)
    assert not [value for _, value in seen if value not in numbers]


def test_read_results_leaves_out_summaries_and_other_modes(tmp_path):
    (tmp_path / "summary.json").write_text("[]")
    (tmp_path / "live.json").write_text(json.dumps({**result(), "mode": "live"}))
    (tmp_path / "alsd_pp.json").write_text(json.dumps(result()))
    assert read_results(tmp_path) == [result()]
