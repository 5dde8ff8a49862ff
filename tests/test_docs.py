"""What the documents say of the project is true of it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import documents
import pytest
from documents import DOCS, NOTES, PAGES, ROOT

import weights
import zoo
from zoo import CATALOGUE, Model
from zoo.bench.record import Record
from zoo.browsing.page import MADE_BY

named = pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: f"{page.parent.name}/{page.name}")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("generate")


@pytest.fixture
def models(generate: ModuleType) -> ModuleType:
    del generate
    return importlib.import_module("making.models")


# Links.


@named
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in documents.links(page):
        if "://" in target:
            parts = urlsplit(target)
            if parts.scheme != "https" or "." not in (parts.hostname or ""):
                wrong.append(target)
            continue
        file, _, anchor = target.partition("#")
        leads = page.parent / file if file else page
        if not leads.exists() or (anchor and anchor not in documents.anchors(leads)):
            wrong.append(target)
    assert wrong == []


def test_every_page_can_be_reached_from_the_first_one() -> None:
    seen, ahead = set(), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            ahead += [
                page.parent / target.partition("#")[0] for target in documents.links(page) if "://" not in target and target[0] != "#"
            ]
    assert {page.name for page in DOCS.glob("*.md")} <= {page.name for page in seen}


# The build, and the pages that are written by a program.


def build(folder: Path, into: Path) -> subprocess.CompletedProcess[str]:
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(into / "trees")]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, str(folder), str(into / "html")], capture_output=True, text=True)


def test_the_documents_build_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "html",
            str(DOCS),
            str(tmp_path / "html"),
            "-d",
            str(tmp_path / "trees"),
        ],
        capture_output=True,
        text=True,
    )
    assert (built.returncode, built.stderr) == (0, "")
    assert (tmp_path / "html" / "index.html").is_file()
    assert MADE_BY in (tmp_path / "html" / "checkpoints.html").read_text(encoding="utf-8")
    assert 'href="checkpoints.html"' in (tmp_path / "html" / "browse.html").read_text(encoding="utf-8")


def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text(
        (DOCS / "conf.py").read_text(encoding="utf-8").replace("CONTENTS = {", "CONTENTS = {} and {"), encoding="utf-8"
    )
    (tmp_path / "index.md").write_text("# Here\n\n[there](index.md#nowhere)\n", encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(tmp_path), str(tmp_path / "html")], capture_output=True, text=True
    )
    assert built.returncode != 0
    assert "nowhere" in built.stderr


def test_what_is_written_from_registries_is_not_stale(generate: ModuleType, models: ModuleType) -> None:
    counted = dict(re.findall(r"^\| (\w+) \| [\d,]+ \| ([\d.,]+) \|", documents.read(DOCS / "models.md"), re.MULTILINE))
    assert set(counted) == set(CATALOGUE)

    def count(cls: type[Model]) -> float:
        """What the page says, as it is counted elsewhere: all of them would take ten seconds."""
        return float(counted[cls.__name__].replace(",", ""))

    writers = (generate.formats, generate.commands, generate.api, generate.benchmarks, generate.confined, generate.curves)
    writers += (generate.errors, generate.extras, generate.faults, generate.law, generate.scaling, generate.speeds)
    rest = {name: text for writer in writers for name, text in writer.write().items()}
    assert generate.stale({**models.write(models.record(), count), **rest}) == []


def test_every_measured_network_stands_on_the_page_of_measurements(generate: ModuleType) -> None:
    page = documents.read(DOCS / "benchmarks.md")
    for name in generate.benchmarks.RECORDS:
        measured = Record.read(DOCS / f"{name}.json")
        part = page.partition(f"## {generate.benchmarks.heading(measured)}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(r"^\| (\w+) \| (\d+) \| ([\d,.]+) \|", part, re.MULTILINE))
        assert {(model, int(batch)) for model, batch, _ in shown} == {(cell["model"], cell["batch"]) for cell in measured.cells}
        assert len(shown) == len(measured.cells)


def test_the_page_of_the_embedded_checkpoint_is_that_of_its_log() -> None:
    text = documents.read(DOCS / "resnet20-cifar10.md")
    log = json.loads((ROOT / "weights" / "embedded" / "resnet20_cifar10.json").read_text(encoding="utf-8"))
    assert f"**{log['test_top1']} %**" in text
    assert f"{log['settings']['epochs']} epochs" in text
    assert f"one {log['device']}, torch {log['versions']['torch']}" in text
    shown = re.findall(r"\| \**(\d\d\.\d\d)\** \|$", text, re.MULTILINE)
    assert sorted(map(float, shown)) == sorted(log["chosen_on"]["holdout_top1"].values())


def test_what_is_stale_is_named(generate: ModuleType) -> None:
    assert generate.stale({"models.md": "", "index.md": documents.read(DOCS / "index.md"), "new.md": ""}) == ["models.md", "new.md"]


SAMPLE = {cls.family(): cls for cls in sorted(CATALOGUE.values(), key=lambda cls: -cls.params)}.values()
"""The smallest of each family."""


def test_a_network_of_every_family_is_counted() -> None:
    assert {cls.family() for cls in SAMPLE} == {cls.family() for cls in CATALOGUE.values()}


@pytest.mark.parametrize("cls", SAMPLE, ids=lambda cls: cls.__name__)
def test_multiply_adds_are_those_of_the_page(models: ModuleType, cls: type[Model]) -> None:
    assert re.search(
        rf"^\| {cls.__name__} \| {cls.params:,} \| {models.gmacs(cls):.3g} \|", documents.read(DOCS / "models.md"), re.MULTILINE
    )


def test_multiply_adds_are_those_that_publishers_state() -> None:
    page = dict(re.findall(r"^\| (\w+) \| [\d,]+ \| ([\d.]+) \|", documents.read(DOCS / "models.md"), re.MULTILINE))
    stated = {
        row.model: row.gmacs
        for row in weights.checkpoints()
        if row.gmacs
        and row.model in CATALOGUE
        and row.preprocessing.crop == CATALOGUE[row.model].input_size
        and not row.options.get("aux_logits")
    }
    assert len(stated) > 30
    far = {name: (float(page[name]), gmacs) for name, gmacs in stated.items() if abs(float(page[name]) - gmacs) > 0.01 * gmacs + 0.0015}
    assert far == {}


def test_names_in_the_plot_do_not_overlap(models: ModuleType) -> None:
    plot = importlib.import_module("making.plot")
    points = [plot.Point(f"MobileNetV{n}_Large", 1000 * 1.17**n, 70 + (n * 37 % 11)) for n in range(30)]
    places = {point: (70 + 28 * number, 300 + 20 * (point.y - 75)) for number, point in enumerate(points)}
    boxes = list(plot._labels(places, points[:5]).values())
    assert not any(plot._overlap(one, other) for number, one in enumerate(boxes) for other in boxes[:number])


def test_the_same_figures_give_the_same_picture(models: ModuleType) -> None:
    plot = importlib.import_module("making.plot")
    points = [plot.Point("a", 10.0, 70.0), plot.Point("b", 100.0, 60.0), plot.Point("c & d", 9.0, 60.0)]
    drawn = plot.plot(points, "x", "y")
    assert drawn == plot.plot(points[::-1], "x", "y")
    assert "c &amp; d" in drawn
    assert drawn.count(plot.FRONT) == 5  # two dots, two names and the line


# Commands.


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def spoken(page: Path) -> list[tuple[list[str], str]]:
    """Every call of `zoo` in a page's console blocks, as words, and where."""
    found = []
    for line, where in documents.commands(page):
        for part in re.split(r"\s(?:&&|;|\||>)\s", line):
            words = shlex.split(part)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words[:1] == ["zoo"] or ("-m", "zoo") in pairwise(words):
                found.append((words[words.index("zoo") + 1 :], where))
    return found


@named
def test_every_command_exists_with_its_options(page: Path, generate: ModuleType) -> None:
    known, wrong = generate.commands.commands(), []
    for words, where in spoken(page):
        words = (
            [word for word in words if word not in ("--frozen", "--version", "--install-completion")]
            if words[0].startswith("--")
            else words
        )
        if not words or words == ["COMMAND", "--help"]:
            continue
        name, *rest = words
        if name not in known:
            wrong.append(f"{where}: zoo {name}")
            continue
        takes = {"--help", *_options(known[name])}
        given = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
        wrong += [f"{where}: zoo {name} {option}" for option in given if option not in takes]
    assert wrong == []


def test_the_page_of_commands_lacks_no_option(generate: ModuleType) -> None:
    parts = re.split(r"^## zoo ", documents.read(DOCS / "cli.md"), flags=re.MULTILINE)
    sections = {part.split("\n", 1)[0]: part for part in parts[1:]}
    shared = parts[0].partition("## Shared options")[2]
    for name, one in generate.commands.commands().items():
        for option in (option for option in one.params if option.param_type_name == "option" and not option.hidden):
            for spelt in (*option.opts, *option.secondary_opts):
                assert re.search(rf"`{spelt}[ `]", sections[name]), f"zoo {name} {spelt}"
            words = " ".join(generate.commands._words(option.help)).replace("|", "\\|")
            assert words in sections[name] or words in shared, f"zoo {name} {option.opts[0]}"


def test_commands_are_found_in_the_documents() -> None:
    calls = [words for page in PAGES for words, _ in spoken(page)]
    assert len(calls) > 80
    assert {"convert", "bundle", "finetune", "lock"} <= {words[0] for words in calls}


@named
def test_scripts_modules_and_targets_of_the_console_exist(page: Path) -> None:
    wrong = []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line, where in documents.commands(page):
        wrong += [f"{where}: {name}" for name in re.findall(r"^make ([a-z-]+)", line) if name not in targets]
        wrong += [
            f"{where}: {file}" for file in re.findall(r"python ((?:recipes|tests|docs)/\S+\.py)", line) if not (ROOT / file).is_file()
        ]
        for module in re.findall(r"-m ((?:zoo|weights|convert)[\w.]*)", line):
            if importlib.util.find_spec(module) is None:
                wrong.append(f"{where}: {module}")
    assert wrong == []


# Counts.


def test_what_is_counted_is_counted_right() -> None:
    text = documents.read(DOCS / "proven.md")
    rows = weights.checkpoints()
    full = sum(row.sha256 is not None for row in rows)
    prefix = sum(row.sha256 is None and row.sha256_prefix is not None for row in rows)
    assert f"{len(zoo.CATALOGUE)} networks" in documents.read(ROOT / "README.md")
    assert f"({full} rows)" in text
    assert f"({prefix} rows)" in text
    assert f"({sum(row.sha256_reported is not None for row in rows)} rows)" in text
    weak = sum(row.sha256 is None and row.sha256_prefix is None and row.digest is not None for row in rows)
    assert f"({weak} rows)" in text
    assert f"({len(rows) - full - prefix - weak} rows)" in text
