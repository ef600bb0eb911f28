"""The wheel must carry the namespace package that Hydra looks into, and the presets."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from nemo_gpu_decoding.presets import conf_folder

ROOT = Path(__file__).parents[2]


def build(source, target, folder):
    """Build one of `wheel` and `sdist`, and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def test_a_wheel_built_from_the_sdist_has_the_hydra_plugin_and_the_presets(tmp_path):
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("nemo_gpu_decoding", "hydra_plugins", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build(source, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    installed = tmp_path / "installed"
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as wheel:
        wheel.extractall(installed)
    presets = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("conf/*/*.yaml"))
    assert (
        sorted(
            str(file.relative_to(installed / "nemo_gpu_decoding")) for file in installed.rglob("*.yaml")
        )
        == presets
    )
    assert (installed / "hydra_plugins/nemo_gpu_decoding/__init__.py").is_file()
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


def test_a_clone_uses_its_own_presets():
    assert conf_folder() == ROOT / "conf"
