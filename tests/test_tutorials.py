"""Every tutorial runs from its first cell to its last."""

import sys

import pytest

from tests.assets import ROOT

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))


def test_there_are_tutorials():
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, monkeypatch):
    pytest.importorskip("nemo.collections.asr")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpecManager

    # the kernel of this very interpreter, whatever kernels the machine has registered
    spec = KernelSpecManager().get_kernel_spec("python3")
    monkeypatch.setattr(
        spec, "argv", [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    )
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: spec)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": path.parent}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
