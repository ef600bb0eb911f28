"""One small run of each strategy, without other decoders."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.options import STRATEGIES

TINY = (
    "tasks=[peaked] peers=[] beams=[2] graph_beams=[8] utterances=2 vocab_size=32 min_frames=20 max_frames=40 "
    "sentences=100 lm_order=2 repeats=1 pair_seconds=0.01 phrases=2 many_phrases=12 group_sizes=[2] max_active=500 "
    "encoder_width=16 prediction_width=24 transducers=[rnnt] streams=[2] live_seconds=1"
)
# Strategies of which each row of whole utterances has another decoder beside it
IN_STREAMS = ("alsd_pp", "aes_pp", "cuda_wfst")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_is_verified_and_timed(strategy, tmp_path, capsys):
    if strategy in ("cuda_wfst", "paged_biglm"):
        pytest.importorskip("kaldifst")
    mode = "live" if strategy in IN_STREAMS else "batch"
    assert main([*TINY.split(), f"strategy={strategy}", f"mode={mode}", f"out={tmp_path}/rows.json"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows
    assert all(row["verified"] and row["ratio"] > 0 for row in rows), rows
    assert f"{strategy} on " in capsys.readouterr().out
