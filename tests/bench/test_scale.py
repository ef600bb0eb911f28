"""LMs of any size: the made-up LM is a proper one, its text an ARPA file, the stages tell the truth."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.probe import STATUS
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.scale import run as scale_run
from nemo_gpu_decoding.bench.scale import stages
from nemo_gpu_decoding.bench.scale.arpa_text import fixed_point, format_ngrams, symbol_table, write_arpa
from nemo_gpu_decoding.bench.scale.ngrams import SyntheticLM
from nemo_gpu_decoding.bench.scale.process import run_stage
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.search.word_graph.decoder import NO_END

NGRAMS = 2000


@pytest.fixture(scope="module")
def options(tiny_options) -> BenchOptions:
    return replace(
        tiny_options, strategy="paged_biglm", mode="scale", ngrams=NGRAMS, graph_beams=[20],
        small_share=0.05,
    )  # fmt: skip


@pytest.fixture(scope="module")
def arpa(options, tmp_path_factory):
    path = tmp_path_factory.mktemp("scale")
    stages.generate(options, path)
    return path / stages.LARGE


def test_the_lm_has_the_size_that_was_asked_for_and_is_closed(arpa):
    lm = read_arpa(arpa)
    counts = [len(order.symbols) for order in lm.orders]
    assert len(counts) == 3
    assert 0.95 * NGRAMS < sum(counts) <= NGRAMS
    assert min(counts) > 0
    listed = [set(map(tuple, order.symbols.tolist())) for order in lm.orders]
    for n in (1, 2):
        assert {gram[:-1] for gram in listed[n]} <= listed[n - 1]
        assert {gram[1:] for gram in listed[n]} <= listed[n - 1]
        assert len(listed[n]) == counts[n]


def test_words_after_a_word_add_up_to_one(arpa):
    lm = pack_arpa_in_memory(arpa)
    labels = [label for label, word in enumerate(lm.words) if word != "<s>"]
    for state in range(1, lm.num_states):
        after_one_word = lm.arrays.states["backoff_to"][state] == 0
        if after_one_word:
            costs = np.array([lm.advance(state, label)[0] for label in labels])
            assert np.exp(-costs).sum() == pytest.approx(1.0, abs=1e-3)


def test_a_seed_gives_the_same_file_again_and_another_seed_another(options, arpa, tmp_path):
    for seed, is_same in ((options.seed, True), (options.seed + 1, False)):
        stages.generate(replace(options, seed=seed), tmp_path)
        assert ((tmp_path / stages.LARGE).read_bytes() == arpa.read_bytes()) is is_same


def test_many_small_blocks_list_the_same_ngrams(options, arpa, tmp_path, monkeypatch):
    for module in ("ngrams", "arpa_text"):
        monkeypatch.setattr(f"nemo_gpu_decoding.bench.scale.{module}.BLOCK", 64)
    language, _, _ = stages.draw(options)
    lm = SyntheticLM(language, options.ngrams, np.random.default_rng(options.seed + 1))
    write_arpa(lm, tmp_path / "lm.arpa")
    for mine, other in zip(read_arpa(tmp_path / "lm.arpa").orders, read_arpa(arpa).orders, strict=True):
        assert (mine.symbols == other.symbols).all()


def test_lines_are_what_python_would_write():
    table = symbol_table(["<s>", "no", "ñandú"])
    symbols = np.array([[1, 2], [2, 0]])
    text = format_ngrams(np.array([-0.5, -12.0]), symbols, table, np.array([-0.25, 0.0]))
    assert text.decode() == "-0.50000\tno ñandú\t-0.25000\n-9.99999\tñandú <s>\t-0.00000\n"
    assert format_ngrams(np.array([-1.0]), symbols[:1, :1], table) == b"-1.00000\tno\n"
    values = -np.random.default_rng(0).random(200) * 9.9
    assert [bytes(row).decode() for row in fixed_point(values)] == [f"{value:.5f}" for value in values]


def test_rows_of_all_stages(options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("kaldifst")

    def in_this_process(stage, options, folder, **arguments):
        answer = stages.STAGES[stage](options, folder, **arguments)
        took = {"seconds": {"cpu": 1.0, "wall": 1.0}}
        return answer | took | {"memory": {"peak_rss": 1 << 30, "peak_anonymous": None}}

    monkeypatch.setattr(scale_run, "run_stage", in_this_process)
    out = tmp_path / "r.json"
    rows = run(replace(options, folder=str(tmp_path), out=str(out), note="a test"))
    written = json.loads(out.read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert (written["mode"], written["options"]["note"]) == ("scale", "a test")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    by_stage = {(row["stage"], row.get("layout")): row for row in rows}
    assert len(by_stage) == len(rows) == 7
    generated, graph = by_stage["generate", None], by_stage["graph", None]
    exact, quantised = by_stage["pack", "exact"], by_stage["pack", "quantised"]
    assert exact["ngrams"] == quantised["ngrams"] == sum(generated["counts"])
    assert graph["graph"]["ngrams"] < exact["ngrams"] / 10
    assert quantised["bytes"] < exact["bytes"] < generated["bytes"]
    for row in (exact, quantised):
        arrays = row["arrays"]
        share = 1 - arrays["arcs"] / sum(arrays.values())
        assert row["paged"]["device_share"] == pytest.approx(share)
    small, both = by_stage["small_lm", None], by_stage["paged_biglm", "exact"]
    assert both["work_per_frame"]["look_ups"] > 0
    assert small["work_per_frame"] == {}
    for row in (small, both, by_stage["paged_biglm", "quantised"]):
        assert row["verified"]
        assert row["frames_per_second"] > 0
        assert 0 <= row["wer"] < 100
    printed = capsys.readouterr().out
    assert "% of it on a GPU if paged" in printed
    assert "look-ups per frame, verified: yes" in printed


@dataclass
class Found:
    """A result with the LM score that a search claims for a text of one word."""

    lm_score: float
    notes: tuple[str, ...] = ()

    @property
    def best(self):
        parts, word = SimpleNamespace(lm=self.lm_score), SimpleNamespace(text="no such word")
        return SimpleNamespace(parts=parts, words=(word,))


def test_scores_of_another_lm_are_no_success(arpa):
    lm = pack_arpa_in_memory(arpa)
    score = -lm.score(["no such word"])
    assert stages.scores_are_of(lm, [Found(score)])[0]
    cut_off = Found(score + 3.0, (NO_END,))
    verified, how = stages.scores_are_of(lm, [Found(score), cut_off, Found(score)])
    assert verified
    assert how == "LM scores of 2 of 2 texts off by at most 1e-02; 1 more end within a word"
    verified, how = stages.scores_are_of(lm, [Found(score), Found(score + 0.1)])
    assert not verified
    assert how == "LM scores of 1 of 2 texts off by at most 1e-02"
    assert not stages.scores_are_of(lm, [Found(score), Found(float("nan"))])[0]
    assert not stages.scores_are_of(lm, [Found(score), cut_off])[0]
    assert not stages.scores_are_of(lm, [])[0]


def test_a_stage_has_a_process_of_its_own(options, tmp_path):
    answer = run_stage("generate", options, tmp_path)
    assert answer["bytes"] == (tmp_path / stages.LARGE).stat().st_size
    assert answer["seconds"]["cpu"] > 0
    if STATUS.exists():
        assert 1 << 20 < answer["memory"]["peak_anonymous"] < answer["memory"]["peak_rss"]


def test_a_stage_that_fails_shows_why(options, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError, match=r"the stage pack failed:\nno space left"):
        run_stage("pack", options, tmp_path, layout="exact")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ngrams": 10}, "ngrams is 10, expected an integer >= 1000"),
        ({"strategy": "cuda_wfst"}, "strategy is 'cuda_wfst', expected paged_biglm with mode=scale"),
        ({"data": "x.npz"}, "data is 'x.npz' with mode=scale"),
        ({"folder": "nowhere"}, "folder is 'nowhere', expected an existing folder"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**{"mode": "scale", "strategy": "paged_biglm", **changes})
