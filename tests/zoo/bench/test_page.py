from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zoo.bench import chart, inference_page, page, tables
from zoo.bench.record import Record
from zoo.commands.app import main

WAYS = ("eager-fp32", "eager", "recipe")
FIGURE = ("ResNet50", "VGG19")


def row(images_s: float, batch: int) -> dict[str, Any]:
    us = 1e6 * batch / images_s
    spread = {f"{key}{end}": us * factor for key in ("us", "latency_us") for end, factor in (("", 1), ("_low", 0.9), ("_high", 1.25))}
    return {"build_s": 1.5, "error": 6.0e-3, "limit": 7e-3, "memory_mib": 512.0, "images_s": images_s, "roofline": 0.5, **spread}


def cell(model: str, batch: int, ours: float | None, *peers: float) -> dict[str, Any]:
    ways = {name: row(rate, batch) for name, rate in zip(WAYS, peers, strict=False)}
    ways["fast"] = row(ours, batch) if ours else {"failed": "red: relative error 1.0e-01, allowed 1.0e-02"}
    made = {"model": model, "batch": batch, "size": 224, "date": "2026-11-22", "twin": "torchvision", "rounds": 20, "plain_error": 6e-3}
    fastest = max(zip(peers, WAYS, strict=False))
    return {**made, "ways": ways, "fastest_peer": fastest[1], **({"ratio": ours / fastest[0]} if ours else {})}


@pytest.fixture
def record() -> Record:
    about = {
        "type": "cuda",
        "device": "NVIDIA H200",
        "driver": "580.1",
        "dtype": "bfloat16",
        "tune": "quick",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "openvino": "2026.4"},
    }
    cells = [
        cell("ResNet50", 256, 4000.0, 500.0, 1000.0, 2000.0),
        cell("VGG19", 256, 900.0, 100.0, 500.0, 1000.0),
        cell("DenseNet121", 256, 1500.0, 100.0, 500.0, 1000.0),
        cell("GoogLeNet", 256, None, 100.0, 500.0, 1000.0),
        cell("ResNet50", 1, 30.0, 5.0, 10.0, 20.0),
    ]
    return Record(about, cells)


def test_a_bars_height_is_its_images_a_second(record: Record) -> None:
    bars, panels, _ = chart.layout(record, FIGURE)
    assert [b.way for b in bars if (b.model, b.batch) == ("ResNet50", 256)] == [*WAYS, "fast"]
    for batch in (1, 256):
        mine = [b for b in bars if b.batch == batch]
        ceiling = panels[batch][1]
        assert {round((b.base - b.top) / (b.value or 1), 9) for b in mine} == {round(chart.PLOT / ceiling, 9)}
        assert all(b.top >= panels[batch][0] for b in mine)
    assert panels[256][1] == 4300


def test_bars_do_not_overlap_and_stay_on_the_page(record: Record) -> None:
    bars = sorted((b for b in chart.layout(record, FIGURE)[0] if b.batch == 256), key=lambda b: b.left)
    assert all(one.right < two.left for one, two in itertools.pairwise(bars))
    assert bars[0].left >= chart.MARGIN
    assert bars[-1].right <= chart.WIDTH - chart.MARGIN


def test_the_picture_has_the_bars_in_their_colours(record: Record, tmp_path: Path) -> None:
    file = chart.save(chart.grouped(record, FIGURE), tmp_path / "bars.png")
    bars, _, end = chart.layout(record, FIGURE)
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    assert picture.width == chart.SCALE * chart.WIDTH
    assert chart.SCALE * end < picture.height < chart.SCALE * (end + 100)
    for bar in bars:
        x = round(chart.SCALE * (bar.left + bar.right) / 2)
        colour = tuple(bytes.fromhex(chart.COLOURS[bar.way][1:]))
        column = [y for y in range(picture.height) if picture.getpixel((x, y)) == colour]
        inside = [y for y in column if chart.SCALE * bar.top - 1 <= y <= chart.SCALE * bar.base]
        assert len(inside) == pytest.approx(chart.SCALE * (bar.base - bar.top), abs=2)


def test_a_failed_way_has_no_bar(record: Record) -> None:
    record.cells[0]["ways"]["recipe"] = {"failed": "OutOfMemoryError: CUDA out of memory"}
    bars, _, _ = chart.layout(record, FIGURE)
    failed = next(b for b in bars if (b.model, b.batch, b.way) == ("ResNet50", 256, "recipe"))
    assert failed.value is None
    assert failed.top == failed.base
    assert chart.grouped(record, FIGURE).width == chart.SCALE * chart.WIDTH


def test_networks_are_ranked_by_their_mean_ratio_and_failures_are_not_left_out(record: Record) -> None:
    assert chart.ranking(record) == ["ResNet50", "DenseNet121", "VGG19", "GoogLeNet"]


def test_the_overview_is_green_right_of_one_and_red_left_of_it(record: Record) -> None:
    record.cells = [c for c in record.cells if c["batch"] == 256 and "ratio" in c]
    pixels = np.asarray(chart.overview(record))
    green, red = (pixels == tuple(bytes.fromhex(colour[1:])) for colour in (chart.OURS_COLOUR, chart.BAD))
    green, red = green.all(2), red.all(2)
    assert red.any()
    assert red.any(0).nonzero()[0].max() < green.any(0).nonzero()[0].min()
    widths = sorted({int(width) for width in green.sum(1) if width})
    assert len(widths) == 2
    assert widths[1] / widths[0] == pytest.approx(1.0 / 0.5, rel=0.03)  # ratios 2.0 and 1.5


def test_pictures_of_nothing_are_refused(record: Record, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of AlexNet is in the record; it has ResNet50"):
        chart.layout(record, ["AlexNet"])
    for each in record.cells:
        each.pop("ratio", None)
    with pytest.raises(ValueError, match="no ratio to draw"):
        chart.overview(record)
    with pytest.raises(ValueError, match=r"name it bars\.png"):
        chart.save(chart.grouped(record, FIGURE), tmp_path / "bars.svg")


def test_the_section_is_replaced_and_the_rest_untouched(record: Record, tmp_path: Path) -> None:
    begin, end = page.marks(record)
    document = tmp_path / "benchmarks.md"
    document.write_text(f"# Ours\n\nbefore |\n\n{begin}\nold text\n{end}\n\n## After\n\n  as it was\n", encoding="utf-8")
    written = page.write(record, document, FIGURE)
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"# Ours\n\nbefore |\n\n{begin}\n")
    assert text.endswith(f"{end}\n\n## After\n\n  as it was\n")
    assert "old text" not in text
    assert [p.name for p in written] == ["benchmarks.md", "benchmarks-cuda-bfloat16.png", "benchmarks-cuda-bfloat16-zoo.png"]
    assert all(p.is_file() for p in written)
    page.write(record, document, FIGURE)
    assert document.read_text(encoding="utf-8") == text
    assert len(list(tmp_path.iterdir())) == 3


def test_a_second_device_gets_a_section_of_its_own(record: Record, tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Ours\n", encoding="utf-8")
    page.write(record, document, FIGURE)
    first = document.read_text(encoding="utf-8")
    assert first.startswith("# Ours\n\n<!-- zoo bench: inference cuda bfloat16")
    other = Record({**record.about, "type": "cpu", "device": "AMD EPYC", "dtype": "float32"}, record.cells)
    page.write(other, document, FIGURE)
    both = document.read_text(encoding="utf-8")
    assert both.startswith(first.rstrip())
    assert both.count("## Inference, ") == 2


@pytest.mark.parametrize("order", ["{0}", "{1}", "{1}\n{0}", "{0}\n{1}\n{0}\n{1}"])
def test_damaged_marks_change_nothing(order: str, record: Record, tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(order.format(*page.marks(record)), encoding="utf-8")
    before = document.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="once each"):
        page.write(record, document, FIGURE)
    assert document.read_text(encoding="utf-8") == before


def test_the_section_says_device_date_versions_and_figures(record: Record) -> None:
    text = page.section(record, [("bars", "bars.png")])
    assert "2026-11-22, NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0." in text
    assert "openvino" not in text
    assert "![bars](bars.png)" in text
    assert "| ResNet50 | 500 | 1,000 | *2,000* | 4,000 | **2.00x** | 8.0x |" in text
    assert "| GoogLeNet | 100 | 500 | *1,000* | - | - | - |" in text
    assert "| ResNet50 | 3,200-4,444 | 64.00 | 128 | 6.0e-03 | 6.0e-03 | 512 | 512 | 50% | 50% | 1.5 | 1.5 |" in text
    assert "- GoogLeNet, batch 256, fast(): `red: relative error 1.0e-01, allowed 1.0e-02`" in text
    assert text.index("### Batch 1\n") < text.index("### Batch 256")
    assert "--models ResNet50,VGG19,DenseNet121,GoogLeNet --batches 1,256 --dtype bfloat16" in text


def test_the_section_says_how_far_the_means_of_each_cells_norms_were_off(record: Record) -> None:
    assert "means that are 0.1 deviations off what a picture gives. " in page.section(record, [])
    for cell in record.cells[1:]:
        cell["means_off"] = 0.03
    assert "means that are 0.03 deviations off what a picture gives, in 1 cell 0.1. " in page.section(record, [])


@pytest.mark.parametrize(("ratio", "shown"), [(1.5, "**1.50x**"), (0.996, "**1.00x**"), (0.99, "0.99x"), (None, "-")])
def test_a_ratio_is_bold_where_we_are_no_slower(ratio: float | None, shown: str) -> None:
    assert tables.over({} if ratio is None else {"ratio": ratio}) == shown


def test_tables_have_as_many_cells_in_every_row(record: Record) -> None:
    lines = page.section(record, []).splitlines()
    tables = [[line.count("|") for line in block.splitlines()] for block in "\n".join(lines).split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    assert all(len(set(counts)) == 1 for counts in tables)


def test_the_section_says_what_each_op_wins_where_the_record_does(record: Record) -> None:
    assert "What each op wins" not in page.section(record, [])
    record.cells[0]["ways"]["fast"]["ops"] = {
        "conv": {"steps": 50, "us": 2000.0, "pytorch_us": 6000.0},
        "pool": {"steps": 1, "us": None, "pytorch_us": None},
    }
    record.cells[1]["ways"]["fast"]["ops"] = {
        "aten": {"steps": 2, "us": 100.0, "pytorch_us": 100.0},
        "conv": {"steps": 15, "us": 1000.0, "pytorch_us": 1500.5},
    }
    text = page.section(record, [])
    assert "### What each op wins\n" in text
    assert "| op | networks | steps | ms | PyTorch's ms | saves ms |" in text
    assert "| conv | 2 | 65 | 3.00 | 7.50 | 4.50 |\n" in text
    assert "| pool | 1 | 1 | - | - | - |\n" in text
    assert "| aten | 1 | 2 | 0.10 | 0.10 | 0.00 |\n" in text


def test_the_command_shows_what_each_op_wins(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.cells[0]["ways"]["fast"]["ops"] = {"conv": {"steps": 50, "us": 2000.0, "pytorch_us": 6000.0}}
    record.write(tmp_path / "r.json")
    assert main(["bench", "--from-json", str(tmp_path / "r.json")]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("conv")]
    assert row == ["conv", "1", "50", "2.00", "6.00", "4.00"]


def test_a_record_comes_back_as_it_was_written(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "r.json")
    again = Record.read(tmp_path / "r.json")
    assert (again.about, again.cells) == (record.about, record.cells)
    assert again.ways == [*WAYS, "fast"]


def test_the_command_writes_the_page_from_a_record(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write(tmp_path / "r.json")
    document = tmp_path / "page.md"
    assert main(["bench", "--from-json", str(tmp_path / "r.json"), "--docs", str(document)]) == 0
    shown = capsys.readouterr()
    assert "fold+compile+graph" in shown.out
    assert "red: relative error" in shown.out
    assert "page-cuda-bfloat16-zoo.png" in shown.err
    assert "| VGG19 | 100 | 500 | *1,000* | 900 | 0.90x | 9.0x |" in document.read_text(encoding="utf-8")


def test_records_of_one_device_are_shown_together_and_others_are_refused(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(tmp_path / "a.json")
    Record(record.about, [cell("VGG19", 256, 1800.0, 100.0, 500.0, 1000.0), cell("Xception", 1, 30.0, 5.0, 10.0, 20.0)]).write(
        tmp_path / "b.json"
    )
    files = ["--from-json", str(tmp_path / "a.json"), "--from-json", str(tmp_path / "b.json")]
    assert main(["bench", *files, "--save", str(tmp_path / "both.json")]) == 0
    assert main(["bench", *files, "--save", str(tmp_path / "both.json")]) == 2
    assert main(["bench", *files, "--save", str(tmp_path / "both.json"), "--replace"]) == 0
    both = Record.read(tmp_path / "both.json")
    assert len(both.cells) == len(record.cells) + 1
    again = both.cell("VGG19", 256)
    assert again is not None
    assert again["ratio"] == 1.8
    Record({**record.about, "device": "NVIDIA H100"}, []).write(tmp_path / "b.json")
    capsys.readouterr()
    assert main(["bench", *files]) == 1
    assert "can't be shown together: measured with device NVIDIA H200, not NVIDIA H100" in " ".join(capsys.readouterr().err.split())


def test_eagers_memory_is_the_least_that_was_measured() -> None:
    ways: dict[str, Any] = {
        "eager": {"memory_mib": None},
        "eager-fp32": {"memory_mib": 200.0},
        "eager-cl": {"memory_mib": 100.4},
        "compile": {"memory_mib": 1.0},
    }
    assert inference_page._eagers_least({"ways": ways}) == "100"
    assert inference_page._eagers_least({"ways": {"eager": {"memory_mib": None}}}) == "-"
