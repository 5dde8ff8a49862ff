"""The notebooks run from top to bottom, and are kept without what they printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
ANEW = """
import os, tempfile
os.chdir({folder!r})
os.environ.update({environment!r})
tempfile.tempdir = {folder!r}
%reset -f
"""
"""Nothing of the notebook before is left but what Python keeps of imports, which take four seconds a kernel."""
OWN = ("ZOO_CACHE", "ZOO_USER_REGISTRY", "HF_HOME", "TORCH_HOME")


@pytest.fixture(scope="module")
def kernel(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all notebooks; where none of them runs there is none."""
    from jupyter_client.manager import KernelManager  # seconds, which the other workers need not spend

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        patch.setenv("ZOO_REAL", str(real))
        for name in OWN:
            patch.setenv(name, str(tmp_path_factory.mktemp("kernel")))
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel()
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def test_there_are_notebooks() -> None:
    names = ["01_predict_and_features", "02_finetune", "03_convert_with_proof", "04_kernels", "05_explain_dream_stylize"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_no_outputs(path: Path, tmp_path: Path, kernel: Any) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    anew = ANEW.format(folder=str(tmp_path), environment={name: os.environ[name] for name in OWN})
    notebook.cells.insert(0, nbformat.v4.new_code_cell(anew))
    client = NotebookClient(notebook, km=kernel, timeout=300)
    try:
        client.execute()
    finally:
        if client.kc:
            client.kc.stop_channels()
    assert all(cell.execution_count for cell in code)
