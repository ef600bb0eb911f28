"""`bench` hands its options over."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.bench import run as bench_run
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.cli.main import main


def test_options_reach_the_benchmark(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_run, "run", seen.append)
    assert main(["bench", "peers=[nemo]", "beams=[4]", "repeats=2", "probes=false"]) == 0
    assert seen == [BenchOptions(peers=["nemo"], beams=[4], repeats=2, probes=False)]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("peers=[kaldi]", "peers holds kaldi"),
        ("beams=[]", "beams is []"),
        ("beam=4", "did you mean beams?"),
    ],
)
def test_bad_options_are_refused(argument, problem, capsys):
    assert main(["bench", argument]) == 2
    assert problem in capsys.readouterr().err
