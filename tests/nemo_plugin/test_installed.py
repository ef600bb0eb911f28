"""The package as others find it: what a wheel holds; processes that import NeMo and nothing of ours."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_gpu_decoding.presets import conf_folder
from tests.assets import ROOT, build, quoted

pytestmark = pytest.mark.slow


def test_a_wheel_built_from_the_sdist_has_the_hydra_plugin_and_the_presets(tmp_path):
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nemo_gpu_decoding", "hydra_plugins", "conf", "docs", "benchmarks", "tools", "assets/hard_speech"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        assert not [name for name in archive.getnames() if "/docs/" in name and name.endswith((".png", ".svg"))]
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    installed = tmp_path / "installed"
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as wheel:
        wheel.extractall(installed)
    presets = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("conf/*/*.yaml"))
    assert (
        sorted(str(file.relative_to(installed / "nemo_gpu_decoding")) for file in installed.rglob("*.yaml")) == presets
    )
    assert (installed / "hydra_plugins/nemo_gpu_decoding/__init__.py").is_file()
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {
        "nemo_gpu_decoding", "hydra_plugins"
    }  # fmt: skip
    assert not [path for path in installed.rglob("*") if path.suffix in (".safetensors", ".gz")]
    # with it, the plugins of other packages would no longer be found
    assert not (installed / "hydra_plugins/__init__.py").exists()
    code = "from nemo_gpu_decoding import presets as p; print(p.conf_folder(), *p.preset_names())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    folder, *names = done.stdout.split()
    assert Path(folder) == installed / "nemo_gpu_decoding" / "conf"
    assert names == sorted(Path(preset).stem for preset in presets)


def test_clone_reads_the_presets_of_its_tree():
    assert conf_folder() == ROOT / "conf"


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
    """What the Hydra script gives on two files for each way of asking. The preset is first, as it needs most."""
    pytest.importorskip("nemo.collections.asr")
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
            f"ctc_decoding.wfst.arpa_lm_path={quoted(assets / 'lm' / 'word3.arpa')}",
            "ctc_decoding.wfst.boosting_tree.key_phrases_list=[graam]",
            "ctc_decoding.wfst.boosting_tree_alpha=8",
        ],
    }
    if find_spec("kaldifst") is None:
        del ways["word graph"]
    model = f"model_path={quoted(assets / 'models' / 'self_ctc.nemo')}"
    two_files = f"files=[{quoted(files[0])},{quoted(files[2])}]"
    lines = [[model, two_files, f"output={quoted(folder / str(n))}", *way] for n, way in enumerate(ways.values())]
    (folder / "lines.json").write_text(json.dumps(lines))
    done = run(SCRIPT, folder / "lines.json", cwd=folder)

    def result(way):
        output, is_last = folder / str(list(ways).index(way)), way == list(ways)[-1]
        assert output.exists(), done.stderr[-3000:]
        assert done.returncode == 0 or not is_last, done.stderr[-3000:]  # it has to end well, too
        return json.loads(output.read_text())

    return result


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("way", "decoder"), [("strategy", "FlexCTCInfer"), ("preset", "FlexCTCInfer"), ("word graph", "WordGraphInfer")]
)
def test_an_unmodified_hydra_script_takes_strategies_presets_and_new_keys(result_of, utterances, way, decoder):
    if way == "word graph":
        pytest.importorskip("kaldifst")
    found = result_of(way)
    assert found["decoder"] == decoder
    if way == "strategy":
        assert found["texts"] == [utterances[0]["text"], utterances[2]["text"]]
    else:  # with phrases
        assert found["texts"][0].endswith("carla graam")


BROKEN = """
import sys
sys.modules["nemo_gpu_decoding.nemo_plugin.register"] = None  # importing it fails
from hydra.core.plugins import Plugins
Plugins.instance()
"""


@pytest.mark.nemo
def test_broken_installation_does_not_stop_hydra(tmp_path):
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


@pytest.mark.nemo
def test_hydra_alone_finds_the_plugin_and_nemo_stays_unimported(tmp_path):
    done = run("-c", QUIET, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
