"""The wheel must carry the namespace package that Hydra looks into, and the presets."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_the_hydra_plugin_and_the_presets(tmp_path):
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nemo_gpu_decoding", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    presets = ROOT.glob("nemo_gpu_decoding/conf/**/*.yaml")
    assert {str(preset.relative_to(ROOT)) for preset in presets} <= files
    assert "hydra_plugins/nemo_gpu_decoding/__init__.py" in files
    # with it, the plugins of other packages would no longer be found
    assert "hydra_plugins/__init__.py" not in files
