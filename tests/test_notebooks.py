"""The notebooks run from top to bottom, and are kept without what they printed."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    names = ["01_predict_and_features", "02_finetune", "03_convert_with_proof", "04_kernels"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_no_outputs(path: Path, tmp_path: Path, real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient  # seconds, which the other workers need not spend

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("ZOO_REAL", str(real))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in code)
