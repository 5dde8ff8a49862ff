"""The house keeps its arrows: the law in `tests/arrows.py` holds, and what breaks it is found however it is written."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import arrows
import pytest
from arrows import LAW, ROOT, broken, circles, files, floors, imports, module_of

FILES = files()
MODULES = {module_of(file) for file in FILES}
FAMILIES = [
    f for f in FILES if f.parts[:2] == ("zoo", "networks") and f.stem not in ("__init__", "published", "model", "layers", "assignment")
]
HEAVY = {"torch", "torchvision", "triton", "numpy", "safetensors", "PIL", "huggingface_hub"}


def named(file: Path, source: str | None = None, *, at_import: bool = False) -> set[str]:
    text = (ROOT / file).read_text() if source is None else source
    return {arrow.module for arrow in imports(file, text, MODULES, at_import=at_import)}


def test_every_import_keeps_the_law() -> None:
    assert broken(arrows.arrows(), LAW) == []


def test_every_room_stands_in_the_law_and_every_arrow_of_the_law_is_there() -> None:
    assert arrows.rooms() == LAW.keys()
    there = arrows.between_rooms(arrows.arrows(), LAW)
    assert {(room, other) for room, allowed in LAW.items() for other in allowed} - there.keys() == set()


def test_arrows_run_down_only() -> None:
    assert circles(LAW) == []
    graph: dict[str, set[str]] = {}
    for arrow in arrows.arrows():
        graph.setdefault(module_of(arrow.file), set()).add(arrow.module)
    assert circles(graph) == []


def test_the_house_is_no_higher_and_no_more_tangled_than_was_asked() -> None:
    pairs = arrows.between_rooms(arrows.arrows(), arrows.houses())
    graph = {room: {other for one, other in pairs if one == room} for room in arrows.houses()}
    assert max(floors(graph).values()) <= 9
    assert len([pair for pair in pairs if not USES.intersection(pair)]) <= 100
    for room in USES:  # each is a leaf: the command alone knows it
        assert {one for one, other in pairs if other == room} - {"zoo.training"} == {"zoo.commands"}
        assert len(graph[room]) <= 8
    assert len([file for file in FILES if file.parent == Path("zoo")]) <= 5


USES = {"zoo.browsing", "zoo.detection", "zoo.explanation", "zoo.dreaming", "zoo.recommendation", "zoo.stylizing"}
"""Rooms of what people do with networks that came after the plan of a hundred arrows. Without their own there may be no more than that."""
INJECTIONS = {
    "a family imports another, relatively": ("zoo/networks/vgg.py", "from .resnet import ResNet"),
    "an op imports training, relatively": ("zoo/kernels/ops/stem.py", "from ..training import step"),
    "passes import what tuning found": ("zoo/kernels/passes/trace.py", "from zoo.kernels.tuning.choices import Choices"),
    "images import a command": ("zoo/images/tar.py", "from zoo.commands import doctor"),
    "a lazy import climbs": ("weights/cache.py", "def late():\n    from convert import core"),
    "importlib climbs": ("zoo/labels.py", "import importlib\nimportlib.import_module('zoo.pretrained.trained')"),
    "importlib climbs by an f-string": ("zoo/labels.py", "from importlib import import_module\nimport_module(f'zoo.pretrained.{1}')"),
    "a relative importlib climbs": ("zoo/images/tar.py", "from importlib import import_module\nimport_module('..commands', __package__)"),
    "a public name is taken from above": ("zoo/kernels/passes/trace.py", "from zoo import fast"),
    "types climb too": ("zoo/networks/model.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import zoo.bench"),
}


@pytest.mark.parametrize("name", INJECTIONS)
def test_an_arrow_that_the_law_forbids_is_found(name: str) -> None:
    file, code = INJECTIONS[name]
    ours = [arrow for arrow in imports(Path(file), code, MODULES) if arrow.module.split(".")[0] in arrows.OURS]
    found = broken(ours, LAW) or relatives(Path(file), code)
    assert len(found) == 1
    assert found[0].startswith(file)


def test_a_package_that_the_law_does_not_know_is_found() -> None:
    law = {room: allowed for room, allowed in LAW.items() if room not in ("zoo", "zoo.networks")}
    assert any("the law knows no room of zoo.networks" in found for found in broken(arrows.arrows(), law))


def relatives(file: Path, source: str | None = None) -> list[str]:
    """Say which family a family imports."""
    others = {module_of(f) for f in FAMILIES}
    return [f"{file} imports {module}" for module in named(file, source) if module in others] if file in FAMILIES else []


def taken(room: str, *, at_import: bool = True) -> dict[Path, set[str]]:
    """List the packages that each file of a room imports."""
    inside = [file for file in FILES if file.is_relative_to(room)]
    return {file: {name.split(".")[0] for name in named(file, at_import=at_import)} for file in inside}


def test_a_family_imports_no_other() -> None:
    assert [found for file in FAMILIES for found in relatives(file)] == []


def test_weights_know_no_torch() -> None:
    assert not [file for file, found in taken("weights", at_import=False).items() if found & {"torch", "torchvision", "safetensors"}]


def test_convert_imports_frameworks_only_when_called() -> None:
    allowed = set(sys.stdlib_module_names) | {"numpy", "ml_dtypes", "convert", "weights"}
    assert not {file: found - allowed for file, found in taken("convert").items() if found - allowed}


def test_the_command_loads_nothing_heavy_before_it_is_called() -> None:
    assert not {file: found & HEAVY for file, found in taken("zoo/commands").items() if found & HEAVY}


def test_triton_is_imported_by_ops_alone() -> None:
    """It exists on Linux only, and takes a second to import."""
    there = [file for file, found in taken("zoo/kernels").items() if "triton" in found]
    assert there
    assert not [file for file in there if file.parts[2] != "ops"]


def test_the_entry_point_begins_with_nothing_but_the_standard_library() -> None:
    begin, answer = (Path(f"zoo/commands/{name}.py") for name in ("entry_point", "interrupts"))
    assert named(begin, at_import=True) <= {*sys.stdlib_module_names, "zoo.commands.interrupts"}
    assert named(answer, at_import=True) <= set(sys.stdlib_module_names)


def names_twice() -> Iterator[str]:
    """Yield what is a module in one place, and something else by the same name there."""
    for package in ["zoo", "weights", "convert", *sorted(m for m in MODULES if (ROOT / m.replace(".", "/") / "__init__.py").exists())]:
        module = importlib.import_module(package)
        inside = {info.name for info in pkgutil.iter_modules(module.__path__)}
        public = {*getattr(module, "__all__", ()), *vars(module)}
        exported = {name for name in inside & public if not isinstance(getattr(module, name), type(sys))}
        yield from (f"{package}.{name}" for name in exported)


def test_no_public_name_hides_a_module() -> None:
    assert sorted(set(names_twice())) == []
