"""The panel of networks is measured, and its table written, without a GPU too."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "bench_panel.py"


def test_a_row_has_both_times_and_how_long_each_took_to_be_ready(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    main(["--device", "cpu", "--dtype", "float32", "--rounds", "1", "torchvision:squeezenet1_1@1x32"])
    out, err = capsys.readouterr()
    cells = [cell.strip() for cell in out.splitlines()[-1].strip("|").split("|")]
    assert cells[:2] == ["torchvision:squeezenet1_1", "1, 32"]
    assert cells[3] == "-"  # the recipe is a GPU's
    eager, ours, over = (float(cells[place]) for place in (2, 4, 5))
    assert over == pytest.approx(eager / ours, rel=0.5)  # of rounded figures
    assert "relative error" in err or "onnxruntime" in err or "openvino" in err


def test_an_unknown_network_is_named() -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    with pytest.raises(ValueError, match="can't be built"):
        main(["--device", "cpu", "torchvision:no_such_net@1"])
