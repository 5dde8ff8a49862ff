"""The house keeps its arrows: who may import whom, read from the imports themselves, lazy ones included."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import zoo

ROOT = Path(__file__).parents[1]
OURS = ("zoo", "weights", "convert")
FAMILIES = {cls.family().__module__.removeprefix("zoo.") for cls in zoo.CATALOGUE.values()}
FILES = sorted(path.relative_to(ROOT) for package in OURS for path in (ROOT / package).rglob("*.py"))


@cache
def imports(file: Path, top_level_only: bool = False) -> set[str]:
    """Name every module that a file imports; imports under TYPE_CHECKING don't count."""
    tree = ast.parse((ROOT / file).read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            skipped.update(n for child in node.body for n in ast.walk(child))
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            skipped.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module.split(".")[0] in OURS:
                beside = [ROOT.joinpath(*node.module.split("."), a.name) for a in node.names]
                found.update(f"{node.module}.{path.name}" for path in beside if path.is_dir() or path.with_suffix(".py").exists())
    return found


def ours(file: Path) -> set[str]:
    return {name for name in imports(file) if name.split(".")[0] in OURS}


def test_the_walk_sees_the_packages() -> None:
    assert {"zoo/networks/model.py", "weights/fetch.py", "convert/core.py"} <= {str(f) for f in FILES}
    assert "zoo.images.preprocess" in imports(Path("zoo/networks/model.py"))
    assert "zoo.images.preprocess" not in imports(Path("zoo/networks/model.py"), top_level_only=True)


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[0] == "weights"], ids=str)
def test_weights_know_nothing_of_networks_or_torch(file: Path) -> None:
    assert {name for name in ours(file) if not name.startswith("weights")} == set()
    assert not {name for name in imports(file) if name.split(".")[0] in ("torch", "torchvision", "safetensors")}


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[0] == "convert"], ids=str)
def test_convert_knows_no_network_and_imports_frameworks_only_when_called(file: Path) -> None:
    assert {name for name in ours(file) if not name.startswith(("convert", "weights.errors", "weights.wording", "weights.header"))} == set()
    allowed = set(sys.stdlib_module_names) | {"numpy", "ml_dtypes", "convert", "weights"}
    assert {name.split(".")[0] for name in imports(file, top_level_only=True)} <= allowed


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_imports_the_base_and_shared_blocks_only(family: str) -> None:
    assert ours(Path(f"zoo/{family}.py")) <= {"zoo.networks.model", "zoo.networks.layers"}


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[:2] == ("zoo", "kernels")], ids=str)
def test_kernels_know_nothing_of_the_zoo(file: Path) -> None:
    assert {name for name in ours(file) if not name.startswith("zoo.kernels")} == set()
    if file.parts[2] != "ops":  # Triton exists on Linux only, and takes a second to import
        assert not {name for name in imports(file, top_level_only=True) if name.split(".")[0] == "triton"}


ROOMS = {
    "ops": set[str](),
    "differentiable": {"ops"},
    "passes": set[str](),
    "tuning": {"passes", "ops"},
    "plans": {"tuning", "passes", "ops"},
    "engines": {"tuning", "passes"},  # without Triton
    "training": {"differentiable", "ops"},
}
"""The folders of `zoo/kernels` and which others each may import, files beside them left out."""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_kernels_knows_only_those_that_come_before_it_on_the_way(room: str) -> None:
    files = [f for f in FILES if f.parts[:3] == ("zoo", "kernels", room)]
    names = {parts[2] for file in files for name in ours(file) if len(parts := name.split(".")) > 2 and parts[:2] == ["zoo", "kernels"]}
    assert files
    assert names & ROOMS.keys() <= ROOMS[room] | {room}


def test_every_folder_of_the_kernels_is_a_room() -> None:
    assert {f.parts[2] for f in FILES if f.parts[:2] == ("zoo", "kernels") and len(f.parts) > 3} == ROOMS.keys()


def test_the_command_begins_with_nothing_but_the_standard_library() -> None:
    assert imports(Path("zoo_command.py"), top_level_only=True) <= set(sys.stdlib_module_names)
    assert ours(Path("zoo_command.py")) == {"zoo.commands.app"}


def test_the_base_imports_preprocessing_only_when_called() -> None:
    assert ours(Path("zoo/networks/model.py")) == {"zoo.images.preprocess"}
    assert ours(Path("zoo/networks/layers.py")) == set()


def test_only_the_bridges_join_weights_and_convert() -> None:
    both = {str(f) for f in FILES if f.parts[0] == "zoo" and {n.split(".")[0] for n in ours(f)} >= {"weights", "convert"}}
    bridges = {
        "finding",
        "trained",
        "adding",
        "foreign",
        "converting",
        "exporting",
        "converted",
        "proving",
        "folding",
        "inspecting",
        "reporting",
        "golden",
    }  # weights arrive; files are converted
    assert both <= {f"zoo/{bridge}.py" for bridge in bridges}
    assert "zoo/pretrained/resolve.py" in both
