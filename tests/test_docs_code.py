"""Every block of Python in the documents runs: with small files for downloads, and only compiled where it needs a GPU and none is there."""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documents
import numpy as np
import own_network_files
import pytest
import torch
from documents import DOCS, NOTES, PAGES, Block
from hubserver import HubServer
from PIL import Image
from torch import nn

import weights
import weights.registry
import zoo
from convert.formats import safetensors
from weights import Checkpoint
from zoo import CATALOGUE, ResNet20

WRITTEN = [page for page in [*PAGES, *NOTES] if documents.blocks(page, "python")]
STANDS_IN = {"ResNet50": r"trained\(ResNet50\b", "MobileNetV2": r"trained\(MobileNetV2\b", "EfficientNetLite0": r"train_style\("}
"""Networks whose downloads are replaced, the checkpoints of every tag by one file of random weights, and what of a page loads them."""
LARGE = 2_000_000
"""Elements above which a tensor of an untrained network is left at nought, for drawing them takes longer than the tests may."""
RAISES = re.compile(r"#.*\braises (\w+)")
GPU, REAL = "gpu", "photographs"
"""Words behind a fence whose code is only compiled, imports made and names found: without a GPU, or for want of photographs."""


def given(page: Path) -> dict[str, Any]:
    """What a page speaks of without making it."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"kernel": (4, 3, 3, 3), "kernel1": (8, 16, 1, 1), "kernel2": (4, 8, 1, 1), "x": (2, 16, 6, 6), "images": (2, 3, 32, 32)}
    norm = [torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)]
    known = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    known["labels"] = torch.tensor([1, 2])
    if page.parent.name == "notes" and page.name == "kernels.md":
        known["x"] = known["x"].contiguous(memory_format=torch.channels_last)
        known |= {"norm1": norm, "norm2": [tensor[:4].clone() for tensor in norm]}
        known |= {
            name: getattr(importlib.import_module("zoo.kernels.differentiable"), name)
            for name in ("conv_stats", "norm_act_conv", "batch_norm_act")
        }
    return known


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for `STANDS_IN`, of one draw; made when they are first needed."""
    return tmp_path_factory.mktemp("weights")


def stand_in(name: str, files: Path) -> Path:
    path = files / f"{name}.safetensors"
    if not path.is_file():
        safetensors.save(CATALOGUE[name]().state_dict(), path)
    return path


def registry(folder: Path, files: Path, pages: str) -> None:
    """Write the shipped tables of the networks that a page loads, with files of this machine for sources."""
    tables = []
    for name, loading in STANDS_IN.items():
        if re.search(loading, pages):
            path = stand_in(name, files)
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            tables += [table(row, path.as_uri(), sha256) for row in weights.checkpoints(name) if "." not in row.tag]
    tables += [table(row, row.sources[0], row.sha256 or "") for row in weights.checkpoints("ResNet20")]
    (folder / "all.toml").write_text("\n".join(tables), encoding="utf-8")


def table(row: Checkpoint, source: str, sha256: str) -> str:
    p = row.preprocessing
    sizes = "".join(f"{name} = {size}, " for name, size in (("resize", p.resize), ("crop", p.crop)) if size)
    lines = [
        f"[{row.model}.{row.tag}]",
        f"default = {str(row.default).lower()}",
        f'sources = ["{source}"]',
        'format = "safetensors"',
        'names = "torchvision"',
        f'sha256 = "{sha256}"',
        f"num_classes = {row.num_classes}",
        f'labels = "{row.labels}"',
        f"metrics = {{ top1 = {row.metrics.get('top1', 1.0)} }}",
        'metrics_data = "a stand-in"',
        'license = "MIT"',
        f'preprocessing = {{ {sizes}interpolation = "{p.interpolation}", mean = {list(p.mean)}, std = {list(p.std)} }}',
        'provenance = "tests"',
    ]
    return "\n".join(lines) + "\n"


def small_files(folder: Path) -> None:
    """Write what blocks open: photographs, and weights under the names that they have there."""
    draw = np.random.default_rng(0)
    for name in ("cat", "a", "b", "photo"):
        Image.fromarray(draw.integers(0, 255, (48, 64, 3), np.uint8)).save(folder / f"{name}.jpg")
    for label in ("cats", "dogs"):
        for number in range(6):
            (folder / "photos" / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / "photos" / label / f"{number}.png")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run in, networks whose large tensors are not drawn, and a catalogue that is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    small_files(tmp_path)
    before = dict(CATALOGUE)
    for name in ("uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "xavier_uniform_"):
        monkeypatch.setattr(nn.init, name, sparing(getattr(nn.init, name)))
    yield tmp_path
    CATALOGUE.clear()
    CATALOGUE.update(before)


def sparing(draw: Any) -> Any:
    def drawn(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return tensor.detach().zero_() if tensor.numel() > LARGE else draw(tensor, *args, **options)

    return drawn


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block statement by statement; one whose comment says that it raises has to."""
    lines = block.text.splitlines()
    for statement in ast.parse(block.text).body:
        code = compile(ast.Module([statement], []), str(block), "exec")
        last = lines[(statement.end_lineno or statement.lineno) - 1]
        expected = RAISES.search(last)
        raised = ""
        try:
            exec(code, names)
        except Exception as error:
            raised = type(error).__name__
            if expected is None or raised != expected[1]:
                raise AssertionError(f"{block}: {ast.unparse(statement)[:120]} raises {raised}: {error}") from error
        assert expected is None or raised, f"{block}: {last.strip()} does not raise"


def resolve(block: Block, names: dict[str, Any]) -> None:
    """Compile a block that can't run here, import what it imports, and find every name that it uses."""
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    bound = {*names, *dir(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), str(block), "exec"), names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
    bound |= {*names}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert used <= bound, f"{block}: nobody knows {', '.join(sorted(used - bound))}"
    for name in bound - {*names, *dir(builtins)}:
        names[name] = None  # for the next such block of the page


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_code_runs(
    page: Path, place: Path, files: Path, hub: HubServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = documents.read(page)
    tables = tmp_path_factory.mktemp("registry")
    registry(tables, files, text)
    monkeypatch.setattr(weights.registry, "SHIPPED", tables)
    if "hf://acme/wheels" in text:
        hub.repo("acme/wheels", {"model.safetensors": stand_in("ResNet50", files).read_bytes()})
    if '"weights.pth"' in text:
        torch.save(ResNet20().state_dict(), place / "weights.pth")
    if page.name == "own-network.md":
        own_network_files.write(place)
        monkeypatch.syspath_prepend(str(place))
    names: dict[str, Any] = {"__name__": "documents", **given(page)}
    for block in documents.blocks(page, "python"):
        if REAL in block.words or (GPU in block.words and not torch.cuda.is_available()):
            resolve(block, names)
        else:
            run(block, names)


def test_blocks_say_what_they_are() -> None:
    known = {"python", "console", "text", "toml", "diff", "json", "julia"}
    every = [block for page in [*PAGES, *NOTES] for block in documents.blocks(page)]
    assert [str(block) for block in every if block.language not in known] == []
    assert {word for block in every for word in block.words} <= {GPU, REAL}
    assert sum(block.language == "python" for block in every) > 15


def block(text: str, *words: str) -> Block:
    return Block(DOCS / "none.md", 1, "python", words, textwrap.dedent(text))


def test_a_block_that_fails_is_named_with_its_statement() -> None:
    with pytest.raises(AssertionError, match=r"none.md:1: zoo.nothing\(\) raises AttributeError"):
        run(block("import zoo\nzoo.nothing()\n"), {})


def test_a_block_that_does_not_raise_as_it_says_fails() -> None:
    run(block("int('x')   # raises ValueError\n"), {})
    with pytest.raises(AssertionError, match="raises ValueError: invalid literal"):
        run(block("int('x')   # raises TypeError\n"), {})
    with pytest.raises(AssertionError, match="does not raise"):
        run(block("int('1')   # raises ValueError\n"), {})


def test_names_that_nobody_knows_are_found_without_running() -> None:
    resolve(block("from zoo import fast\nmodel = fast(image)\n"), {"image": 1})
    with pytest.raises(AssertionError, match="nobody knows image"):
        resolve(block("from zoo import fast\nmodel = fast(image)\n"), {})
    with pytest.raises(ImportError):
        resolve(block("from zoo import faster\n"), {})


# Tables beside other libraries.

FOREIGN = sorted(DOCS.glob("from-*.md"))
FREE = {"model", "images", "image", "weights", "index", "maps"}
"""What stands in a table's cell for something of the reader's."""


def cells(page: Path, column: int) -> list[str]:
    """The code in a column of a page's first table."""
    rows = [line for line in documents.read(page).splitlines() if line.startswith("| ")][1:]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[column + 1])]


@pytest.mark.parametrize("page", FOREIGN, ids=lambda page: page.name)
def test_what_stands_for_it_here_exists(page: Path) -> None:
    wrong = []
    for code in cells(page, 2):
        if code.startswith(("zoo ", "ZOO_", "torch.")) or code.isidentifier():
            continue
        for node in ast.walk(ast.parse(code.replace("…", "..."))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "model":
                wrong += [] if hasattr(ResNet20, node.attr) or hasattr(nn.Module, node.attr) else [code]
            if isinstance(node, ast.Name) and node.id not in FREE | {"weights", "zoo"} and not hasattr(zoo, node.id):
                wrong.append(code)
    assert wrong == []
    assert len(cells(page, 2)) > 10


@pytest.mark.reference
@pytest.mark.parametrize("library", ["torchvision", "timm", "keras"])
def test_what_it_is_called_there_exists(library: str) -> None:
    codes = [code for code in cells(DOCS / f"from-{library}.md", 1) if f"{library}." in code]
    assert len(codes) > 4
    for code in codes:
        for dotted in re.findall(rf"\b{library}(?:\.\w+)+", code):
            found = importlib.import_module(library)
            for part in dotted.split(".")[1:]:
                found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
        compile(code, library, "eval")
