"""The script that compares the results of two trees."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from nemo_gpu_decoding import NBest, Path, ScoreParts
from tests.assets import ROOT, load_script

goldens = load_script(ROOT / "scripts" / "goldens.py")


def nbest(score):
    empty = np.zeros(2, np.int32)
    return NBest((Path(empty + 3, empty, empty + 1, np.ones(2, np.float32), score, ScoreParts(score)),), num_frames=9)


def recording(folder, value, **more):
    folder.mkdir()
    (folder / "goldens.json").write_text(json.dumps(dict(goldens.leaves(value, "case")) | more))
    return folder


def compared(tmp_path, old, new, *expected):
    (tmp_path / "expected.txt").write_text("".join(f"{line}\n" for line in expected))
    return goldens.compare(old, new, goldens.Expected(tmp_path / "expected.txt"), 5)


def test_compare_reports_a_score_that_differs_in_the_last_bit(tmp_path, capsys):
    old, same = recording(tmp_path / "old", [nbest(-1.5)]), recording(tmp_path / "same", [nbest(-1.5)])
    assert compared(tmp_path, old, same) == 0
    new = recording(tmp_path / "new", [nbest(np.nextafter(-1.5, 0))])
    assert compared(tmp_path, old, new, "removed *score") == 1
    shown = capsys.readouterr().out
    assert "case/0/paths/0/score: -0x1.8000000000000p+0 -> -0x1.7ffffffffffffp+0" in shown
    assert "expected, but not seen: *score" in shown
    assert compared(tmp_path, old, new, "changed */score", "changed *acoustic") == 0


def test_compare_reports_missing_hypotheses_and_cases_that_fail(tmp_path, capsys):
    old = recording(tmp_path / "old", [nbest(-1.5), nbest(-2.5)])
    assert compared(tmp_path, old, recording(tmp_path / "new", [nbest(-1.5)])) == 1
    assert "case/length: 2 -> 1" in capsys.readouterr().out
    failed = recording(tmp_path / "failed", {}, **{"case/error": "FieldError: no such option"})
    assert compared(tmp_path, old, failed) == 1
    assert "differences. FieldError: no such option" in capsys.readouterr().out
    assert compared(tmp_path, old, failed, "removed case/*") == 0


@pytest.mark.slow
def test_messages_of_expected_errors_are_recorded_and_compared(tmp_path, capsys):
    caught = "def test_it():\n    with pytest.raises(ValueError):\n        int('x1')"
    tests = f"import pytest\n\n{caught}\n\ndef test_without_expected_errors():\n    assert False\n"
    folders = [recording(tmp_path / name, {}) for name in ("old", "new")]
    for folder, text in zip(folders, (tests, tests.replace("x1", "x2")), strict=True):
        (folder / "test_it.py").write_text(text)
        command = [sys.executable, goldens.__file__, "messages", folder, f"--tree={folder}", "-q"]
        subprocess.run(command, check=True, env=os.environ, capture_output=True)
    assert compared(tmp_path, *folders) == 1
    message = "message of test_it.py::test_it: ValueError: invalid literal for int() with base 10: 'x1'"
    assert message in capsys.readouterr().out
    assert compared(tmp_path, *folders, "removed message of test_it.py*") == 0
