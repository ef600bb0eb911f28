from __future__ import annotations

import pytest

from nemo_gpu_decoding.bench.plot import _lines, plot_rows


def row(peer="nemo", beam=4, skipped=None):
    params = {"beam_size": beam, "lm": True, "phrases": 0}
    return {
        "strategy": "flexctc_beam",
        "peer": peer,
        "params": params,
        "peer_params": params,
        "rtfx": {"ours": 2000.0 / beam, "peer": 10.0},
        "wer": {"ours": 3.0, "peer": 4.0},
        "skipped": skipped,
    }


def test_every_decoder_gets_one_line_with_a_point_per_beam_size():
    lines = _lines([row(beam=4), row(beam=8), row("flashlight", beam=8)])
    assert {label: len(points) for label, points in lines.items()} == {
        "flexctc_beam + LM": 2,
        "nemo + LM": 2,
        "flashlight + LM": 1,
    }


def test_skipped_rows_and_rows_beside_ourselves_are_left_out():
    assert set(_lines([row(), row("flashlight", skipped="not installed"), row("flexctc_beam", 16)])) == {
        "flexctc_beam + LM",
        "nemo + LM",
    }


def test_nothing_to_plot_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_rows([row(skipped="not installed")], str(tmp_path / "x.png"), "title")
