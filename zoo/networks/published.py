"""What every network of the zoo is, whatever its task: class keywords become configuration, class lines enter a catalogue."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from torch import Tensor, nn

from weights.arguments import did_you_mean, python_scalar, unknown_keyword, whole
from weights.errors import WeightsError

if TYPE_CHECKING:
    from weights import Checkpoint

WORDS = {
    "pretrained": "{0}() is untrained; trained({0}) loads pretrained weights",
    "weights": "{0}() is untrained; trained({0}, TAG) loads the weights of that tag, URL or path",
    "checkpoint": "{0}() is untrained; trained({0}, PATH) loads a file",
    "device": '{0}().to("cuda") moves it',
    "dtype": "{0}().to(torch.bfloat16) changes it",
    "features_only": "features({0}(), ...) and pyramid({0}()) give inner maps",
}
"""What to do instead of other libraries' words; {0} is the class."""
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a word"),
}
"""What an option may be whose default is of this kind."""


class Published(nn.Module):
    """A network whose variants are class lines.

    A family derives from it and declares its configuration as ``ClassVar`` annotations; a variant is one class line that
    sets them as class keywords, and `params` makes it a member of its task's `catalogue`. A keyword that no family declares raises
    ``TypeError`` when the class is created.

    `Model` is the base of classifiers. Networks for other tasks say by `told_by`, `description` and `adopt` what `trained` asks.
    """

    task: ClassVar[str]
    """What its answers are: "classification", "detection", "segmentation"; `zoo list` has a section for each."""
    catalogue: ClassVar[dict[str, Any]]
    """Every published variant of this task by its class name, in the order of definition."""
    tasks: ClassVar[dict[str, type[Published]]] = {}
    """The base of all networks of a task that this program has loaded, by the task."""
    params: ClassVar[int]
    """Published number of trainable parameters with the default constructor arguments."""
    paper: ClassVar[str]
    """Link to the paper whose table the variant comes from."""
    input_size: ClassVar[int]
    """Side in pixels of the images that the variant was published with."""
    min_size: ClassVar[int] = 1
    """Smallest side in pixels that the network's arithmetic allows."""

    classifiers: ClassVar[tuple[str, ...]]
    """Names of the layers, or of modules of layers, whose outputs are as many as the classes ask for."""

    labels: ClassVar[str | None] = None
    """The list of labels, of `zoo.labels`, that the variant's classes are, where neither a record nor a file says it."""

    num_classes: int
    in_channels: int
    checkpoint: Checkpoint | None = None
    """The record of the weights that `trained` loaded, or None."""

    if TYPE_CHECKING:  # layers that a loop has added are unknown to type checkers, and nn.Module says they may be tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__()
        declared = {
            name
            for base in cls.__mro__
            for name, annotation in inspect.get_annotations(base).items()
            if str(annotation).startswith(("ClassVar", "typing.ClassVar"))
        }
        for name, value in config.items():
            if name not in declared:
                hint = did_you_mean(name, declared) or f"; it declares {', '.join(sorted(declared))}"
                raise TypeError(f"{cls.__name__}: {cls.__bases__[0].__name__} has no class keyword {name!r}{hint}")
            setattr(cls, name, value)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)
        if "task" in vars(cls):
            Published.tasks[cls.task] = cls
        if "params" in config:
            if cls.catalogue.get(cls.__name__, cls).__module__ != cls.__module__:
                raise TypeError(f"{cls.__name__} is published already; a network of your own takes another name, or no params")
            cls.catalogue[cls.__name__] = cls

    @classmethod
    def variant(cls) -> type[Self]:
        """Return the published variant that this class is, or derives from; the class itself where there is none."""
        return cast("type[Self]", next((base for base in cls.__mro__ if "params" in vars(base)), cls))

    @classmethod
    def family(cls) -> type[Self]:
        """Return the family's class, ResNet for ResNet50."""
        return cast("type[Self]", cls.variant().__mro__[1])

    @classmethod
    def usual_classes(cls) -> int:
        """Return the number of classes that it is built with where nothing is said."""
        return inspect.signature(cls).parameters["num_classes"].default

    @classmethod
    def description(cls, format: str) -> tuple[str, str] | None:
        """Return the ending and the text of what must lie beside a file of a format for its reader, as Darknet's .cfg; None for nothing."""
        del format
        return None

    @classmethod
    @contextmanager
    def described(cls, path: Path, format: str) -> Iterator[Path]:
        """Give the path of a file that has `description` beside it, whatever lies beside it otherwise.

        What goes wrong inside says the file's own name.
        """
        beside = cls.description(format)
        if beside is None:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, path.name)
            try:
                file.symlink_to(path.absolute())
            except OSError:  # where links are a privilege
                shutil.copyfile(path, file)
            described = file.with_suffix(beside[0])
            described.write_text(beside[1], encoding="utf-8")
            try:
                yield file
            except WeightsError as error:
                error.args = (str(error).replace(str(file), str(path)).replace(described.name, cls.__name__), *error.args[1:])
                raise

    @classmethod
    def told_by(cls, facts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a file that no registry knows asks for: constructor keywords, and fields of `weights.Preprocessing`.

        Args:
            facts: what the file says of itself, `convert.source.Source.facts`, and its "format"; empty of safetensors.
        """
        raise NotImplementedError

    def adopt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a file's tensors, by the file's own names, under this network's; `trained` compares names and shapes afterwards."""
        return dict(tensors)


def _checked(build: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor take whole numbers of any library, and name the public class and the right word in its errors."""
    known = list(inspect.signature(build).parameters.values())[1:]
    names = [one.name for one in known]
    usual = {one.name: one.default for one in known}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known)

    @wraps(build)
    def init(self: Published, *args: Any, **options: Any) -> None:
        called = type(self).__name__
        for word in () if takes_all else options:
            if word not in names:
                raise unknown_keyword(f"{called}()", word, names, {key: todo.format(called) for key, todo in WORDS.items()})
        given = dict(zip(names, args, strict=False)) | options
        counts = {name: whole(name, given[name]) for name in ("num_classes", "in_channels") if name in given}
        placed = [counts.get(name, python_scalar(value)) for name, value in zip(names, args, strict=False)]
        named = {name: counts.get(name, python_scalar(value)) for name, value in options.items()}
        for name, value in (dict(zip(names, placed, strict=False)) | named).items():
            kinds, what = KINDS.get(type(usual.get(name)), ((), ""))
            if kinds and type(value) not in kinds:
                raise TypeError(f"{called}'s {name} is {what}, {usual[name]!r} by default, not {value!r:.60}")
        build(self, *placed, *args[len(placed) :], **named)

    return init
