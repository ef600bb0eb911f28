"""Rows of transducers: a synthetic task that can be decoded, equality with NeMo, and what is skipped."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.transducer.cases import NO_TDT, ONE_FUSION
from nemo_gpu_decoding.bench.transducer.strategies import TRANSDUCER_STRATEGIES
from nemo_gpu_decoding.bench.transducer.synthetic import synthetic_transducer
from nemo_gpu_decoding.bench.transducer.verify import equal_to_nemo
from nemo_gpu_decoding.bench.verify import Errors
from nemo_gpu_decoding.search.result import Path


@pytest.fixture
def options(tiny_options):
    return replace(tiny_options, encoder_width=64, prediction_width=64, strategy="alsd_pp")


@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_the_synthetic_transducer_says_nearly_what_was_drawn(options, kind, strategy):
    task = synthetic_transducer(options, kind)
    assert task.kind == kind
    ours = TRANSDUCER_STRATEGIES[strategy](options)
    ours.prepare(task, Setting(4, lm=True))
    assert Errors.of(task, ours.decode(task.inputs, task.lengths)).ter < 40
    assert task.first(1).inputs.shape == (1, int(task.lengths[0]), 64)


@pytest.mark.nemo
@pytest.mark.parametrize("strategy", ["alsd_pp", "aes_pp"])
def test_rows_are_verified_beside_nemo(options, strategy, tmp_path, capsys):
    pytest.importorskip("nemo.collections.asr")
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    asked = {"strategy": strategy, "peers": ["nemo"], "out": str(out), "plot": str(plot)}
    rows = run(replace(options, **asked))
    assert json.loads(out.read_text())["rows"] == rows
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert {row["networks"] for row in rows} == {"rnnt", "tdt"}
    beams = [row for row in rows if row["peer"] != "nemo_greedy"]
    measured = [row for row in beams if not row["skipped"]]
    assert all(row["verified"] for row in measured), [row["verified_by"] for row in measured]
    reasons = [row["skipped"] for row in beams if row["skipped"]]
    assert reasons == ([ONE_FUSION, NO_TDT] if strategy == "aes_pp" else [])
    assert len(measured) == (3 if strategy == "aes_pp" else 6)
    if strategy == "aes_pp":
        assert all("after mending" in row["verified_by"] for row in measured)
    assert "networks" in capsys.readouterr().out


@pytest.mark.nemo
def test_wrong_scores_are_not_verified(options):
    pytest.importorskip("nemo.collections.asr")
    from nemo_gpu_decoding.bench.peers.nemo_transducer import NemoMALSD

    task = synthetic_transducer(options, "rnnt")
    theirs, ours = NemoMALSD(options), TRANSDUCER_STRATEGIES["alsd_pp"](options)
    for decoder in (theirs, ours):
        decoder.prepare(task, Setting(4))
    paths = ours.paths

    def too_good(inputs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        return [replace(path, score=path.score + 1) for path in paths(inputs, lengths)]

    assert equal_to_nemo(task, theirs, ours)[0]
    ours.paths = too_good
    verified, how = equal_to_nemo(task, theirs, ours)
    assert not verified
    assert "0 of 2" in how


def test_transducers_are_not_measured_on_a_gpu_here(options):
    with pytest.raises(ValueError, match="expected cpu with strategy=alsd_pp"):
        run(replace(options, device="cuda"))


def test_a_narrow_prediction_network_is_refused(options):
    with pytest.raises(ValueError, match="prediction_width is 8, expected at least 64"):
        synthetic_transducer(replace(options, prediction_width=8), "rnnt")
