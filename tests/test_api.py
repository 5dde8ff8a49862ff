"""The public API as a whole: what the packages export is explained, and what the documents use is exported."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import json
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import documents
import pytest
import torch
from documents import DOCS, PAGES

import weights
import zoo
from zoo.variants import of_all_tasks

PACKAGES = (
    "zoo",
    "weights",
    "convert",
    "zoo.embedding",
    "zoo.explanation",
    "zoo.finetuning",
    "zoo.images",
    "zoo.kernels",
    "zoo.kernels.training",
)
packages = pytest.mark.parametrize("package", PACKAGES)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("making.api")


@packages
def test_every_exported_name_is_there_and_has_words_of_its_own(package: str, api: ModuleType) -> None:
    module = importlib.import_module(package)
    names = api.exported(module)
    assert names
    assert [name for name in names if not api.says(name, getattr(module, name))] == []


@packages
def test_exported_names_stand_once_and_in_order(package: str, api: ModuleType) -> None:
    names = api.exported(importlib.import_module(package))
    constants, classes = [n for n in names if n.isupper()], [n for n in names if n[0].isupper() and not n.isupper()]
    assert names == [*sorted(constants), *sorted(classes), *sorted(set(names) - {*constants, *classes})] or names == sorted(set(names))


@packages
def test_every_exported_name_stands_on_the_page_that_explains_it(package: str, api: ModuleType) -> None:
    def says(page: str, name: str) -> bool:
        text = documents.read(DOCS / f"{page}.md")
        code = [block.text for block in documents.blocks(DOCS / f"{page}.md")] + re.findall(r"`([^`\n]+)`", documents.FENCE.sub("", text))
        return any(re.search(rf"\b{name}\b", piece) for piece in code)

    explained = api.pages_of(package)
    assert set(explained) == set(api.exported(importlib.import_module(package)))
    assert [name for name, page in explained.items() if not says(page, name)] == []


# Docstrings.

NEVER_RAISE = {"plain", "recognise", "verify"}
"""Functions that refuse nothing that they are given."""
NETWORKS = ("ResNet18", "ResNet20", "ResNet50", "MobileNetV2", "YOLOv3Tiny", "FCN_ResNet50", "VGG19")
"""Those that stand in examples."""
SHAPE = re.compile(r"\((?:[A-Z]|\d|height|h\b)[\w', ]*,?[\w', ]*\)")
public = pytest.mark.parametrize("package", ["zoo", "weights", "convert"])


def public_names(package: str, api: ModuleType) -> dict[str, tuple[object, str]]:
    """What a package exports but constants, by name, with its docstring."""
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in api.exported(module) if name not in api.DATA}
    return {name: (value, inspect.getdoc(value) or "") for name, value in found.items()}


def is_error(value: object) -> bool:
    """Errors share one example, their base's; each message says what to do."""
    return isinstance(value, type) and issubclass(value, Exception) and value is not weights.WeightsError


@public
def test_every_public_name_has_an_example_that_runs(package: str, api: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs photographs, a download or a GPU is marked as skipped, and compiled."""
    monkeypatch.chdir(tmp_path)
    parser, lacking, wrong = doctest.DocTestParser(), [], io.StringIO()
    found = public_names(package, api)
    known = {"torch": torch, "Path": Path, **{name: getattr(zoo, name) for name in NETWORKS}, "find": weights.find}
    names = known | {name: value for other in ("zoo", package) for name, (value, _) in public_names(other, api).items()}
    for name, (value, words) in found.items():
        if is_error(value):
            continue
        test = parser.get_doctest(words, dict(names), f"{package}.{name}", None, None)
        lacking += [] if test.examples else [name]
        for example in test.examples:
            compile(example.source, test.name, "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=wrong.write)
    assert lacking == []
    assert wrong.getvalue() == ""


@public
def test_every_public_function_says_what_it_takes_and_what_it_raises(package: str, api: ModuleType) -> None:
    functions = {name: (value, words) for name, (value, words) in public_names(package, api).items() if inspect.isfunction(value)}
    assert [name for name, (_, words) in functions.items() if "Raises:" not in words and name not in NEVER_RAISE] == []
    many = {name: words for name, (value, words) in functions.items() if len(inspect.signature(value).parameters) > 1}
    assert [name for name, words in many.items() if "Args:" not in words] == []


@public
def test_every_tensor_has_its_shape(package: str, api: ModuleType) -> None:
    lacking = []
    for name, (value, words) in public_names(package, api).items():
        if not isinstance(value, type) or is_error(value):
            continue
        for field, kind in inspect.get_annotations(value).items():
            said = re.search(rf"^ +{field}: (.*)$", words, re.MULTILINE)
            if re.search(r"\b(Tensor|ndarray)\b", str(kind)) and said and not SHAPE.search(said[1]):
                lacking.append(f"{name}.{field}: {said[1]}")
    assert lacking == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_takes_from_a_package_is_exported(page: Path, api: ModuleType) -> None:
    """From the packages themselves; a module of one, `zoo.search`, is named as such."""
    taken: set[tuple[str, str]] = set()
    for block in documents.blocks(page, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
            if isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
                taken.update((node.module, alias.name) for alias in node.names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("__"):
                taken.update({(node.value.id, node.attr)} if node.value.id in PACKAGES else ())
    known = {(name, each) for name in PACKAGES for each in api.exported(importlib.import_module(name))}
    known |= {("zoo", name) for name in of_all_tasks()}
    assert {one for one in taken - known if not _is_module(*one)} == set()


def _is_module(package: str, name: str) -> bool:
    return isinstance(getattr(importlib.import_module(package), name, None), ModuleType) and name not in ("sys", "importlib")


def test_what_type_checkers_read_is_what_is_loaded_when_it_is_asked_for(api: ModuleType) -> None:
    """`import zoo` loads nothing; a name that is forgotten on one side would be found by a type checker alone, or by none."""
    tree = ast.parse(Path(zoo.__file__).read_text(encoding="utf-8"))
    read = {
        (node.module, alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for _, name in read} == {*api.exported(zoo), "*"}
    assert zoo.networks("*net50") == ["ResNet50", "SEResNet50"]  # a package that can be called
    for module, name in read - {("zoo.variants", "networks")}:
        if name != "*":
            assert getattr(zoo, name) is getattr(importlib.import_module(str(module)), name)


def test_a_type_checker_knows_each_network_by_its_class_and_no_other_name(tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text("from zoo import VGG19, VGG99, trained\nreveal_type(VGG19)\nreveal_type(trained(VGG19))\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "used.py"]
    found = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout)["generalDiagnostics"]
    assert [one["message"] for one in found] == [
        '"VGG99" is unknown import symbol',
        'Type of "VGG19" is "type[VGG19]"',
        'Type of "trained(VGG19)" is "VGG19"',
    ]


def test_a_star_gives_the_networks_too() -> None:
    found: dict[str, object] = {}
    exec("from zoo import *", found)
    assert found.items() >= zoo.CATALOGUE.items()
    assert found["trained"] is zoo.trained


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for name in ("nothing", "ResNet51"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(zoo, name)


def test_a_name_without_a_page_is_no_page(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.PAGES, "convert", {"convert": "ConvertError core flip formats read Source"})
    with pytest.raises(ValueError, match=r"convert: \['names'\] stand in __all__ or in PAGES, not in both"):
        api.write()


def test_help_can_be_read() -> None:
    """The first screen says what there is; it would take seventy thousand lines if `__all__` had the networks."""
    text = pydoc.plain(pydoc.render_doc(zoo))
    first = text[: text.index("PACKAGE CONTENTS")]
    assert [call for call in ("trained", "predict", "features", "embed", "finetune", "fast") if f"{call}(" not in first] == []
    assert len(first.splitlines()) < 30
    assert len(text.splitlines()) < 7000
