"""The law of arrows: which room may import which, and a reader of imports that sees absolute, relative, lazy and `importlib` ones.

`python tests/arrows.py` prints rooms, floors, arrows and circles as they are. `docs/design.md` shows the law as a table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("zoo", "weights", "convert")

LAW: dict[str, set[str]] = {
    "weights": set(),
    "convert._call_table": set(),
    "convert._calls": {"convert._call_table"},
    "convert._confined": {"convert._calls", "convert._landlock"},
    "convert._kept": {"weights"},
    "convert._landlock": set(),
    "convert.core": set(),
    "convert.graph": set(),
    "convert.kinds": set(),
    "convert.names": {"convert.core"},
    "convert.network": {"convert.kinds"},
    "convert.report": {"convert.kinds"},
    "convert.sets": {"convert.core"},
    "convert.steps": {"convert.kinds"},
    "convert._probe": {"convert.kinds", "convert.network"},
    "convert.source": {"convert.graph", "convert.steps"},
    "convert.topology": {"convert.graph", "convert.network"},
    "convert._guard": {"convert.source", "weights"},
    "convert.adopted": {"convert.core", "convert.source"},
    "convert.match": {"convert.core", "convert.network", "convert.source", "convert.steps", "convert.topology", "weights"},
    "convert.pairing": {"convert.core", "convert.source"},
    "convert.writing": {"convert.core", "convert.network", "convert.source", "convert.steps", "weights"},
    "convert._windows": {"convert._guard", "weights"},
    "convert.completing": {"convert.adopted", "convert.core", "convert.network", "convert.source", "convert.steps", "weights"},
    "convert.diff": {"convert.core", "convert.pairing", "convert.source", "convert.steps", "convert.topology", "weights", "convert.sets"},
    "convert._fault": {"convert._probe", "convert._windows", "convert.graph", "convert.source"},
    "convert._ops": {"convert._guard", "convert._windows", "convert.graph", "weights"},
    "convert._patches": {"convert._windows"},
    "convert.conversion": {
        "convert.adopted",
        "convert.completing",
        "convert.core",
        "convert.names",
        "convert.network",
        "convert.source",
        "convert.steps",
        "weights",
    },
    "convert._layer_faults": {"convert._fault", "convert._ops", "convert._probe", "convert._windows", "convert.steps"},
    "convert.evidence": {"convert.conversion", "convert.network"},
    "convert.execute": {"convert._ops", "convert.graph", "convert.source", "weights"},
    "convert._between_faults": {
        "convert._fault",
        "convert._layer_faults",
        "convert._probe",
        "convert.execute",
        "convert.graph",
        "convert.source",
        "weights",
    },
    "convert.certificate": {
        "convert._probe",
        "convert.core",
        "convert.execute",
        "convert.graph",
        "convert.kinds",
        "convert.source",
        "weights",
    },
    "convert.formats": {
        "convert._kept",
        "convert._guard",
        "convert.core",
        "convert.execute",
        "convert.graph",
        "convert.kinds",
        "convert.names",
        "convert.sets",
        "convert.source",
        "convert.steps",
        "weights",
    },
    "convert._framework": {"convert.formats", "convert.kinds", "weights"},
    "convert._global_faults": {
        "convert._fault",
        "convert._layer_faults",
        "convert._patches",
        "convert._probe",
        "convert.certificate",
        "convert.network",
        "convert.steps",
    },
    "convert._manifest": {"convert._guard", "convert.formats", "convert.graph", "convert.kinds", "convert.source", "convert.steps"},
    "convert._reader": {"convert._confined", "convert._framework", "convert._manifest", "convert.formats", "convert.source", "weights"},
    "convert.diagnose": {
        "convert._between_faults",
        "convert._fault",
        "convert._global_faults",
        "convert._layer_faults",
        "convert._ops",
        "convert._probe",
        "convert._windows",
        "convert.certificate",
        "convert.execute",
        "convert.graph",
        "convert.kinds",
        "convert.network",
        "convert.source",
        "weights",
    },
    "convert.sandbox": {
        "convert._kept",
        "convert._calls",
        "convert._confined",
        "convert._framework",
        "convert._guard",
        "convert._manifest",
        "convert.formats",
        "convert.kinds",
        "convert.sets",
        "convert.source",
        "weights",
    },
    "convert": {"convert.core", "convert.formats", "convert.names", "convert.sandbox", "convert.source", "convert.steps", "weights"},
    "convert.home": {"convert._framework", "convert.formats", "convert.names", "convert.sandbox", "convert.source", "weights"},
    "convert.inspect": {"convert.core", "convert.kinds", "convert.names", "convert.sandbox", "convert.source"},
    "zoo": set(),
    "zoo.kernels": set(),
    "zoo.kernels.activations": set(),
    "zoo.kernels.boxes": set(),
    "zoo.kernels.comparing": set(),
    "zoo.kernels.errors": set(),
    "zoo.kernels.measuring": set(),
    "zoo.kernels.memory": set(),
    "zoo.labels": set(),
    "zoo.images": {"weights"},
    "zoo.kernels.ops": {"zoo.kernels.activations", "zoo.kernels.boxes", "zoo.kernels.measuring"},
    "zoo.kernels.passes": {"zoo.kernels.errors"},
    "zoo.variants": {"weights"},
    "zoo.kernels.__main__": {"zoo.kernels.comparing", "zoo.kernels.measuring", "zoo.kernels.ops"},
    "zoo.kernels.arguments": {"zoo.kernels.comparing", "zoo.kernels.errors", "zoo.kernels.passes"},
    "zoo.kernels.compilation": {"zoo.kernels.measuring", "zoo.kernels.ops"},
    "zoo.kernels.differentiable": {"zoo.kernels.comparing", "zoo.kernels.ops"},
    "zoo.kernels.reports": {"zoo.kernels.comparing", "zoo.kernels.errors", "zoo.kernels.measuring", "zoo.kernels.passes"},
    "zoo.networks": {"weights", "zoo.images", "zoo.kernels.activations", "zoo.labels", "zoo.variants"},
    "zoo.catalogue": {"weights", "zoo.networks", "zoo.variants"},
    "zoo.extraction": {"weights", "zoo.images", "zoo.kernels", "zoo.networks"},
    "zoo.detection": {
        "convert.formats",
        "convert.sandbox",
        "weights",
        "zoo.catalogue",
        "zoo.extraction",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.boxes",
        "zoo.kernels.ops",
        "zoo.labels",
        "zoo.networks",
    },
    "zoo.segmentation": {
        "weights",
        "zoo.catalogue",
        "zoo.extraction",
        "zoo.images",
        "zoo.kernels",
        "zoo.labels",
        "zoo.networks",
    },
    "zoo.training": {
        "weights",
        "zoo.catalogue",
        "zoo.detection",
        "zoo.finetuning",
        "zoo.images",
        "zoo.pretrained",
        "zoo.segmentation",
    },
    "zoo.dreaming": {"weights", "zoo.extraction", "zoo.images", "zoo.kernels", "zoo.kernels.measuring", "zoo.networks"},
    "zoo.kernels.tuning": {
        "zoo.kernels.comparing",
        "zoo.kernels.compilation",
        "zoo.kernels.measuring",
        "zoo.kernels.ops",
        "zoo.kernels.passes",
    },
    "zoo.kernels.engines": {
        "zoo.kernels.compilation",
        "zoo.kernels.comparing",
        "zoo.kernels.errors",
        "zoo.kernels.measuring",
        "zoo.kernels.passes",
        "zoo.kernels.reports",
        "zoo.kernels.tuning",
    },
    "zoo.kernels.quantizing": {
        "weights",
        "zoo.kernels.comparing",
        "zoo.kernels.engines",
        "zoo.kernels.errors",
        "zoo.kernels.measuring",
        "zoo.kernels.passes",
        "zoo.kernels.plans",
        "zoo.kernels.reports",
        "zoo.kernels.tuning",
    },
    "zoo.kernels.plans": {
        "zoo.kernels.comparing",
        "zoo.kernels.compilation",
        "zoo.kernels.errors",
        "zoo.kernels.measuring",
        "zoo.kernels.memory",
        "zoo.kernels.ops",
        "zoo.kernels.passes",
        "zoo.kernels.reports",
        "zoo.kernels.tuning",
    },
    "zoo.kernels.training": {
        "weights",
        "zoo.kernels.activations",
        "zoo.kernels.arguments",
        "zoo.kernels.comparing",
        "zoo.kernels.compilation",
        "zoo.kernels.differentiable",
        "zoo.kernels.errors",
        "zoo.kernels.measuring",
        "zoo.kernels.memory",
        "zoo.kernels.ops",
        "zoo.kernels.reports",
        "zoo.kernels.tuning",
    },
    "zoo.kernels.api": {
        "weights",
        "zoo.kernels.arguments",
        "zoo.kernels.comparing",
        "zoo.kernels.compilation",
        "zoo.kernels.engines",
        "zoo.kernels.errors",
        "zoo.kernels.measuring",
        "zoo.kernels.passes",
        "zoo.kernels.plans",
        "zoo.kernels.quantizing",
        "zoo.kernels.reports",
        "zoo.kernels.training",
        "zoo.kernels.tuning",
    },
    "zoo.julia": {"zoo.kernels"},
    "zoo.conversion": {
        "convert._guard",
        "convert.adopted",
        "convert.certificate",
        "convert.conversion",
        "convert.core",
        "convert.diagnose",
        "convert.evidence",
        "convert.formats",
        "convert.home",
        "convert.inspect",
        "convert.match",
        "convert.names",
        "convert.network",
        "convert.report",
        "convert.sandbox",
        "convert.source",
        "convert.steps",
        "convert.writing",
        "weights",
        "zoo.catalogue",
        "zoo.images",
        "zoo.labels",
        "zoo.networks",
        "zoo.variants",
    },
    "zoo.pretrained": {
        "convert.formats",
        "convert.names",
        "convert.sandbox",
        "convert.sets",
        "convert.source",
        "weights",
        "zoo.catalogue",
        "zoo.conversion",
        "zoo.extraction",
        "zoo.images",
        "zoo.labels",
        "zoo.networks",
        "zoo.variants",
    },
    "zoo.prediction": {"weights", "zoo.catalogue", "zoo.images", "zoo.kernels", "zoo.labels", "zoo.networks", "zoo.pretrained"},
    "zoo.explanation": {
        "weights",
        "zoo.extraction",
        "zoo.images",
        "zoo.kernels",
        "zoo.labels",
        "zoo.networks",
        "zoo.prediction",
        "zoo.pretrained",
    },
    "zoo.embedding": {
        "convert.formats",
        "weights",
        "zoo.catalogue",
        "zoo.extraction",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.arguments",
        "zoo.kernels.quantizing",
        "zoo.networks",
        "zoo.pretrained",
    },
    "zoo.finetuning": {
        "weights",
        "zoo.catalogue",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.ops",
        "zoo.kernels.training",
        "zoo.labels",
        "zoo.networks",
        "zoo.pretrained",
    },
    "zoo.recommendation": {
        "weights",
        "zoo.embedding",
        "zoo.finetuning",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.arguments",
        "zoo.kernels.engines",
        "zoo.networks",
        "zoo.pretrained",
        "zoo.variants",
    },
    "zoo.stylizing": {
        "convert.formats",
        "convert.sandbox",
        "weights",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.measuring",
        "zoo.networks",
        "zoo.pretrained",
    },
    "zoo.browsing": {"weights", "zoo.pretrained", "zoo.variants"},
    "zoo.sharing": {
        "convert.formats",
        "weights",
        "zoo.catalogue",
        "zoo.conversion",
        "zoo.labels",
        "zoo.networks",
        "zoo.pretrained",
        "zoo.variants",
    },
    "zoo.bench": {
        "weights",
        "zoo.embedding",
        "zoo.images",
        "zoo.kernels",
        "zoo.kernels.comparing",
        "zoo.kernels.engines",
        "zoo.kernels.measuring",
        "zoo.kernels.memory",
        "zoo.kernels.quantizing",
        "zoo.kernels.training",
        "zoo.kernels.tuning",
        "zoo.networks",
        "zoo.pretrained",
    },
    "zoo.commands": {
        "convert.diff",
        "convert.formats",
        "convert.sandbox",
        "weights",
        "zoo.bench",
        "zoo.browsing",
        "zoo.catalogue",
        "zoo.conversion",
        "zoo.detection",
        "zoo.dreaming",
        "zoo.embedding",
        "zoo.explanation",
        "zoo.finetuning",
        "zoo.images",
        "zoo.kernels",
        "zoo.networks",
        "zoo.prediction",
        "zoo.pretrained",
        "zoo.recommendation",
        "zoo.segmentation",
        "zoo.sharing",
        "zoo.stylizing",
        "zoo.training",
        "zoo.variants",
    },
}
"""Room -> rooms that it may import. A room is a package, or a module that lies beside packages."""


@dataclass(frozen=True)
class Arrow:
    """One import: the importing file, and the module that it names."""

    file: Path
    module: str
    line: int


def module_of(file: Path) -> str:
    """Return a file's module, `zoo/labels.py` -> "zoo.labels"."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {"zoo": "__version__"}
"""What a room may take from a package above it: the version is a word, not a room."""
ROOFS = (Path("zoo/__init__.py"), Path("zoo/kernels/__init__.py"), Path("weights/__init__.py"))
"""Files that only name what is public, for type checkers and for whoever asks: nothing is imported before."""
PROGRAMS = (Path("zoo/kernels/__main__.py"), Path("convert/_reader.py"))
"""Files that are run, and print what they are run for."""
PART_OF = {"zoo.__main__": "zoo.commands"}
"""`python -m zoo` is the command."""


def files(root: Path = ROOT) -> list[Path]:
    """List the product's files, relative to the root."""
    return sorted(path.relative_to(root) for package in OURS for path in (root / package).rglob("*.py"))


def imports(file: Path, source: str, modules: Iterable[str], *, at_import: bool = False) -> Iterator[Arrow]:
    """Yield every module that a file names, wherever the import stands: at the top, in a function, for types, or by `importlib`.

    Args:
        file: relative to the root.
        source: its text.
        modules: those of the product, to tell a module from a name that one holds.
        at_import: only what is imported when the file is: not in functions, not for types.
    """
    known = set(modules)
    package = module_of(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    tree = ast.parse(source)
    skipped = _late(tree) if at_import else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Arrow(file, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if NAMES.get(base) == alias.name:
                    continue
                yield Arrow(file, inner if inner in known else base, node.lineno)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            named = _literal(node.args[0])
            if named is not None:
                above = package[: len(package) - (len(named) - len(named.lstrip("."))) + 1] if named.startswith(".") else []
                yield Arrow(file, ".".join([*above, *filter(None, [named.strip(".")])]), node.lineno)


def _late(tree: ast.Module) -> set[ast.AST]:
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found.update(ast.walk(node))
        elif isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            found.update(inner for child in node.body for inner in ast.walk(child))
    return found


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.AST) -> str | None:
    """Return what a string says, or how an f-string begins."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def room_of(module: str, rooms: Iterable[str]) -> str | None:
    """Return the room that a module lies in: the longest name of a room that it begins with."""
    module = PART_OF.get(module, module)
    return max((room for room in rooms if module == room or module.startswith(f"{room}.")), key=len, default=None)


def rooms(root: Path = ROOT) -> set[str]:
    """Name every room there is: packages that hold code, and modules beside them."""
    found = {module_of(file) for file in files(root) if len(file.parts) > 1 and file.name == "__init__.py"}
    beside = {room for room in found if any(other.startswith(f"{room}.") for other in found) and room in ("zoo", "zoo.kernels", "convert")}
    found |= {module_of(file) for file in files(root) if module_of(file.parent / "__init__.py") in beside}
    return found - PART_OF.keys()


@cache
def arrows(root: Path = ROOT) -> tuple[Arrow, ...]:
    """Read every import of one of our modules by another."""
    modules = {module_of(file) for file in files(root)}
    found = (arrow for file in files(root) if file not in ROOFS for arrow in imports(file, (root / file).read_text(), modules))
    return tuple(arrow for arrow in found if arrow.module.split(".")[0] in OURS and arrow.module != module_of(arrow.file))


def between_rooms(found: Iterable[Arrow], known: Iterable[str]) -> dict[tuple[str, str], list[Arrow]]:
    """Gather arrows by (room, imported room)."""
    gathered: dict[tuple[str, str], list[Arrow]] = {}
    for arrow in found:
        ends = room_of(module_of(arrow.file), known), room_of(arrow.module, known)
        if ends[0] != ends[1] and ends[0] and ends[1]:
            gathered.setdefault((ends[0], ends[1]), []).append(arrow)
    return gathered


def broken(found: Iterable[Arrow], law: Mapping[str, set[str]]) -> list[str]:
    """Say which arrows the law forbids, and which rooms it does not know."""
    wrong = []
    for arrow in found:
        room, other = room_of(module_of(arrow.file), law), room_of(arrow.module, law)
        where = f"{arrow.file}:{arrow.line}"
        if room is None or other is None:
            wrong.append(
                f"{where} imports {arrow.module}: the law knows no room of {module_of(arrow.file) if room is None else arrow.module}"
            )
        elif room != other and other not in law[room]:
            wrong.append(f"{where} imports {arrow.module}: {room} may not import {other}")
    return wrong


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the circles of a graph: each set of nodes that reach each other."""
    reach: dict[str, set[str]] = {}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return seen

    for node in graph:
        reach[node] = reached(node)
    found = {tuple(sorted(other for other in reach[node] if node in reach.get(other, ()))) for node in graph if node in reach[node]}
    return [list(circle) for circle in sorted(found)]


def floors(graph: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return each room's floor: 1 imports no other room, n imports one on floor n - 1."""
    known: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((floor(other) for other in graph.get(room, ())), default=0)
        return known[room]

    for room in graph:
        floor(room)
    return known


def houses() -> set[str]:
    """Name the rooms that a walk through the house meets: the packages of `zoo`, the modules beside them, `weights` and `convert`."""
    return {".".join(room.split(".")[:2]) if room.startswith("zoo.") else room.split(".")[0] for room in rooms()} - {"zoo"}


def main() -> None:
    """Print what the house looks like."""
    for title, known in (("houses", houses()), ("rooms", rooms())):
        pairs = between_rooms(arrows(), known)
        graph = {room: sorted({other for one, other in pairs if one == room}) for room in sorted(known)}
        round_about = circles(graph)
        levels = {} if round_about else floors(graph)
        print(f"{title}: {len(known)}; arrows {len(pairs)}; floors {max(levels.values(), default=0)}; circles {round_about}")
        for room in sorted(known, key=lambda one: (-levels.get(one, 0), one)):
            print(f"  {levels.get(room, 0)} {room} -> {', '.join(graph[room])}")
    modules: dict[str, list[str]] = {}
    for arrow in arrows():
        modules.setdefault(module_of(arrow.file), []).append(arrow.module)
    print("circles between files:", circles(modules))


if __name__ == "__main__":
    main()
