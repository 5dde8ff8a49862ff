"""A quantised network as it is kept: its graph, its certificate, and a few answers by which another machine checks it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from zoo.kernels.comparing.copies import on_device
from zoo.kernels.comparing.precision import products
from zoo.kernels.engines.export import Form
from zoo.kernels.engines.keep_nan import WATCH
from zoo.kernels.errors import first_line
from zoo.kernels.quantizing import keeping
from zoo.kernels.quantizing.certificate import Certificate, answers, distance
from zoo.kernels.tuning.choices import processor

WITNESSES = 8
"""Held-out images that go with a quantised network, for another machine to check it by."""
SAME_ANSWERS = 0.25
"""Share of the certificate's own error by which answers of another machine may differ from those that were certified."""
LEAST = 5e-3
"""Relative difference that is always allowed there: one value rounded to the next of 256 steps."""
SAME_FLOAT = 1e-3
"""Relative difference up to which two machines' answers in float32 are of one network."""
FORMAT = 3
KIND = "int8"
"""Its folder in the cache, and the name of its facts in a file."""
NARROW = {"bfloat16": ("avx512_bf16", "amx_bf16", "bf16"), "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp")}
"""Types, and the instructions that compute in them."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A network in int8 for one size of image, and what was proven of it.

    Attributes:
        engine: "openvino" or "onnxruntime".
        graph: OpenVINO's IR, or an ONNX model, for a batch of one.
        weights: the IR's weights; empty for ONNX.
        shape: (C, H, W) of an image.
        outputs: names of the outputs, in pytree's order; `WATCH` behind them, where NaN could be lost.
        rest: the type that what stays in float computes in, "float32" or "bfloat16".
        certificate: what was proven, where that was; see `proof`.
        machine: processor, instructions and engine's version that it was proven with.
        witness: a few of the held-out images.
        right: float32's answers to these.
        certified: the quantised network's answers to these where it was certified.
        digest: of weights, images, versions and options: the name in the cache.
    """

    engine: str
    graph: bytes
    weights: bytes
    shape: tuple[int, ...]
    outputs: tuple[str, ...]
    rest: str
    certificate: Certificate
    machine: str
    witness: Tensor
    right: tuple[Tensor, ...]
    certified: tuple[Tensor, ...]
    digest: str
    broken: str = ""
    """Why it must not answer on this machine."""
    rechecked: str = ""
    """What `checked` found on this machine, where that is another; neither goes into a file."""
    state: str = ""
    """Digest of the weights that it was made of, see `state_of`."""

    @property
    def proof(self) -> Certificate:
        """What is proven on this machine."""
        return replace(self.certificate, unproven=self.certificate.unproven or self.broken, rechecked=self.rechecked)

    def made_of(self, network: nn.Module) -> bool:
        """Tell whether a network has the weights that this was made of, and still answers the kept images as it did then in float32."""
        return state_of(network) == self.state and answers_alike(network, self.witness, self.right)

    def build(self, form: Form, batch: int = 1, *, whole: bool = False) -> Callable[..., Any]:
        """Compile it for this machine.

        Args:
            form: of what the network returns.
            batch: images in a call.
            whole: computes a batch as one, and not image by image.

        Raises:
            Exception: whatever the engine raises, where it is absent or can't take the batch as one.
        """
        if self.engine == "onnxruntime":
            from zoo.kernels.engines import onnxruntime

            one = onnxruntime.session(self.graph, ("input_0",), self.outputs, form)
            return one if batch == 1 else _OneByOne(one, form)
        from zoo.kernels.engines import openvino

        model = openvino.core().read_model(self.graph, self.weights)
        if whole and batch > 1:
            model.reshape([batch, *self.shape])
        rest = openvino.precision(getattr(torch, self.rest))
        return openvino.compiled(model, ("input_0",), self.outputs, form, rest, 1 if whole else batch)

    def checked(self, network: Callable[..., Any] | None = None) -> Quantized:
        """Return it with a certificate for this machine.

        Where machine and versions are those of the certificate nothing is computed. Elsewhere the kept images are computed again: the
        certificate goes on to hold where the answers are those that were certified, and is UNPROVEN where they are not.

        Args:
            network: in float32, to compare with too; None compares with its kept answers.
        """
        here = machine(self.engine)
        if here == self.machine:
            return replace(self, broken="", rechecked="")
        form = Form(None, tuple(torch.float32 for _ in self.certified))
        try:
            built = self.build(form)
            flat: Any = getattr(built, "flat")  # noqa: B009
            found = answers(flat, self.witness)
        except Exception as error:  # an engine that is absent, or too old for the graph
            said = f"this machine can't check it: {first_line(error)}"
            return replace(self, rechecked=said, broken=said)
        right = list(self.right) if network is None else answers(network, self.witness)
        certified, asked = list(self.certified), self.certificate.tolerance
        off, allowed = distance(found, certified), max(SAME_ANSWERS * self.certificate.error, LEAST)
        now, then = distance(found, right), distance(certified, right)
        said = (
            f"checked again on {here.partition(';')[0]}: {len(self.witness)} of the images differ by {off:.2g} from the answers that were "
            f"certified on {self.machine.partition(';')[0]}, and by {now:.2g} from float32"
        )
        wrong = ""
        if off > allowed:
            wrong = f"it was certified on another machine, and gives other answers here ({off:.2g}, allowed {allowed:.2g})"
        elif asked.error is not None and now > max(asked.error, then):
            wrong = (
                f"it was certified on another machine, and is further from float32 here than was asked ({now:.2g}, asked {asked.error:.2g})"
            )
        elif asked.top1 is not None and (flips := int((found[0].argmax(1) != certified[0].argmax(1)).sum())) > 1:
            wrong = f"it was certified on another machine, and {flips} of {len(self.witness)} images have another class here"
        return replace(self, rechecked=said, broken=wrong)

    def save(self, path: Path) -> None:
        """Write it as one safetensors file, whole or not at all."""
        tensors = {"graph": _bytes(self.graph), "weights": _bytes(self.weights), "witness": self.witness.contiguous()}
        for name, held in (("right", self.right), ("certified", self.certified)):
            tensors |= {f"{name}.{index}": tensor.clone().contiguous() for index, tensor in enumerate(held)}
        facts = {"format": FORMAT, "engine": self.engine, "shape": self.shape, "outputs": self.outputs, "rest": self.rest}
        facts |= {"machine": self.machine, "digest": self.digest, "state": self.state}
        keeping.write(path, KIND, tensors, facts | {"certificate": self.certificate.facts()})

    @classmethod
    def load(cls, path: Path) -> Quantized:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is damaged, or of another version.
            OSError: it can't be read.
        """
        with keeping.read(path, KIND, FORMAT, "quantised network") as (facts, tensors):
            count = len([name for name in facts["outputs"] if name != WATCH])
            right, certified = (tuple(tensors[f"{name}.{index}"] for index in range(count)) for name in ("right", "certified"))
            return cls(
                facts["engine"],
                tensors["graph"].numpy().tobytes(),
                tensors["weights"].numpy().tobytes(),
                tuple(facts["shape"]),
                tuple(facts["outputs"]),
                facts["rest"],
                Certificate.of(facts["certificate"]),
                facts["machine"],
                tensors["witness"],
                right,
                certified,
                facts["digest"],
                state=facts["state"],
            )


class _OneByOne:
    """Runs a graph for one image on each image of a batch."""

    def __init__(self, one: Any, form: Form) -> None:
        self.one, self.form = one, form

    def __call__(self, images: Tensor) -> Any:
        return self.form.build(self.flat(images))

    def flat(self, images: Tensor) -> list[Tensor]:
        """Return the tensors of the output."""
        return [torch.cat(column) for column in zip(*(self.one.flat(image[None]) for image in images), strict=True)]


def state_of(network: nn.Module) -> str:
    """Return the BLAKE3 of a network's parameters and buffers, with their names, types and shapes."""
    made = blake3()
    for name, value in (*network.named_parameters(), *network.named_buffers()):
        made.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        made.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def answers_alike(network: nn.Module, images: Tensor, right: Sequence[Tensor], device: torch.device | None = None) -> bool:
    """Tell whether a network's answers to images, in float32 on a device, the CPU if left out, are those that were kept."""
    where = device or torch.device("cpu")
    try:
        with products(tf32=False):
            found = answers(on_device(network, where, torch.float32), images.to(where), len(images))
        found = [one.to(kept) for one, kept in zip(found, right, strict=True)]
    except Exception:  # a network that was edited fails in any way whatever
        return False
    if [one.shape for one in found] != [one.shape for one in right]:
        return False
    return all(distance([a], [b]) <= SAME_FLOAT for a, b in zip(found, right, strict=True))


def machine(engine: str) -> str:
    """Name what answers depend on: the processor, its instructions for narrow numbers, the engine's version."""
    return f"{processor()}; {' '.join(instructions()) or 'no instructions for int8'}; {engine} {version_of(engine)}"


@cache
def instructions() -> tuple[str, ...]:
    """Name the instructions for bfloat16 and int8 that this processor has, as Linux calls them; () elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                asked = ("avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "i8mm", "bf16", "asimddp")
                return tuple(name for name in asked if name in line.split())
    return ()


def narrow_kinds() -> tuple[str, ...]:
    """Name the types narrower than float32 that this processor has instructions for, "bfloat16" and "int8"."""
    return tuple(kind for kind, names in NARROW.items() if any(name in instructions() for name in names))


def left_on_the_table() -> str:
    """Say in one line which types narrower than float32 this CPU has; "" where it has none."""
    if not (kinds := narrow_kinds()):
        return ""
    return (
        f"float32 is the default; this CPU also computes {' and '.join(kinds)} ({', '.join(instructions())}): "
        "why(model, precisions=True) measures what that would save"
    )


def version_of(package: str) -> str:
    """Return the version of an installed package, or "absent"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
