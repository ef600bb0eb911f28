"""New processes that import NeMo and nothing of ours: the strategies must be there by themselves."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
pytest.importorskip("nemo.collections.asr")

import nemo_gpu_decoding

ROOT = Path(nemo_gpu_decoding.__file__).parents[1]  # holds hydra_plugins, too, however we are installed
SCRIPT = Path(__file__).with_name("hydra_script.py")


def run(*arguments, cwd):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result_of(assets, files, tmp_path_factory):
    """By the way of asking for us: what the Hydra script gives on two files, once it is asked for.

    All in one new process, where the first finds nothing done yet: the preset, which needs most.
    """
    folder = tmp_path_factory.mktemp("hydra")
    ways = {
        "preset": [
            "+ctc_decoding=flexctc_beam",
            "ctc_decoding.beam.boosting_tree.key_phrases_list=[graam]",
            "+ctc_decoding.beam.merge=sum",
        ],
        "strategy": ["ctc_decoding.strategy=flexctc_beam"],
        "word graph": [
            "+ctc_decoding=cuda_wfst",
            f"ctc_decoding.wfst.arpa_lm_path={assets / 'lm' / 'word3.arpa'}",
            "+ctc_decoding.wfst.boosting_tree.key_phrases_list=[graam]",
            "+ctc_decoding.wfst.boosting_tree_alpha=8",
        ],
    }
    if find_spec("kaldifst") is None:
        del ways["word graph"]
    model = f"model_path={assets / 'models' / 'self_ctc.nemo'}"
    two_files = f"files=[{files[0]},{files[2]}]"
    lines = [
        [model, two_files, f"output={folder / str(n)}", *way] for n, way in enumerate(ways.values())
    ]
    (folder / "lines.json").write_text(json.dumps(lines))
    done = run(SCRIPT, folder / "lines.json", cwd=folder)

    def result(way):
        output, is_last = folder / str(list(ways).index(way)), way == list(ways)[-1]
        assert output.exists(), done.stderr[-3000:]
        assert done.returncode == 0 or not is_last, done.stderr[-3000:]  # it has to end well, too
        return json.loads(output.read_text())

    return result


def test_strategy_alone_in_an_unmodified_hydra_script(result_of, utterances):
    assert result_of("strategy")["decoder"] == "FlexCTCInfer"
    assert result_of("strategy")["texts"] == [utterances[0]["text"], utterances[2]["text"]]


def test_presets_and_new_keys_in_an_unmodified_hydra_script(result_of):
    assert result_of("preset")["decoder"] == "FlexCTCInfer"
    assert result_of("preset")["texts"][0].endswith("carla graam")


def test_a_word_graph_and_its_phrases_in_an_unmodified_hydra_script(result_of):
    pytest.importorskip("kaldifst")
    assert result_of("word graph")["decoder"] == "WordGraphInfer"
    assert result_of("word graph")["texts"][0].endswith("carla graam")


BROKEN = """
import sys
sys.modules["nemo_gpu_decoding.nemo_plugin.register"] = None  # importing it fails
from hydra.core.plugins import Plugins
Plugins.instance()
"""


def test_a_broken_installation_never_stops_hydra(tmp_path):
    done = run("-c", BROKEN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategies of nemo-gpu-decoding are not available" in done.stderr


QUIET = """
import sys
from hydra.core.plugins import Plugins
names = [cls.__name__ for cls in Plugins.instance().discover()]
assert names.count("NemoGpuDecodingSearchPath") == 1, names
assert not [name for name in sys.modules if name == "nemo" or name.startswith("nemo.")]
assert "nemo_gpu_decoding.nemo_plugin.register" in sys.modules
"""


def test_hydra_alone_finds_the_plugin_and_nemo_stays_unimported(tmp_path):
    done = run("-c", QUIET, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
