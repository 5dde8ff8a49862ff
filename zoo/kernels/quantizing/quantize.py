"""From a network and a caller's images to int8 whose certificate holds: the first of several candidates that keeps the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from zoo.kernels.comparing.copies import in_own_dtype, on_device
from zoo.kernels.engines import openvino
from zoo.kernels.engines.export import Form
from zoo.kernels.errors import called, first_line
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.trace import trace
from zoo.kernels.quantizing import by_nncf, by_onnxruntime, keeping
from zoo.kernels.quantizing.certificate import Certificate, Reference, answers, compare
from zoo.kernels.quantizing.images import Images, digest_of
from zoo.kernels.quantizing.quantized import KIND, WITNESSES, Quantized, instructions, machine, state_of, version_of
from zoo.kernels.quantizing.tolerance import Tolerance

KEEP = (1, 2, 4, 8, 16)
"""Layers that stay in float, in turns, where all in int8 keep too little; a third of the layers at most."""
RANKED = 12
"""Calibration images that layers are ranked on."""
FORMAT = 4

Say = Callable[[str], None]


class NotCertified(ValueError):
    """No candidate keeps the tolerance.

    Args:
        message: what was found, and what to do in Python.
        certificates: of the candidates.
        found: what was found, without advice.
    """

    def __init__(self, message: str, certificates: list[Certificate], found: str = "") -> None:
        super().__init__(message)
        self.certificates, self.found = certificates, found or message

    @property
    def nearest(self) -> Certificate:
        """The certificate of the candidate that is nearest to float32."""
        return nearest(self.certificates)


def nearest(certificates: list[Certificate]) -> Certificate:
    """Return the one with the most equal classes, and of these the one with the least error."""
    return max(certificates, key=lambda one: (one.top1 or 0, -one.error))


def quantized(network: nn.Module, images: Images, tolerance: Tolerance, classifies: bool, say: Say = lambda text: None) -> Quantized:
    """Return a network in int8 whose certificate keeps the tolerance; from the cache, where it was made of the same before.

    Args:
        network: takes one tensor of images; not changed.
        images: to calibrate and to compare on.
        tolerance: what the certificate has to show.
        classifies: whether a single row of numbers for each image is logits of classes.
        say: is told, in a few words, what is being done.

    Raises:
        NotCertified: none keeps the tolerance.
        ValueError: nothing that quantises is installed, or it fails on this network.
    """
    key = digest(network, images, tolerance, classifies)
    if (known := keeping.cached(KIND, key, Quantized.load)) is not None and known.made_of(network):
        return known
    single = on_device(network, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        form = Form.of(single(images.calibration[:1].clone()))
    say("float32 answers the held-out images")
    reference = Reference.measure(single, images.check, images.labels, classifies)
    refused: list[Certificate] = []
    failed: dict[str, str] = {}
    for found in _candidates(single, images, form, reference, tolerance, say, failed):
        certificate = replace(found.certificate, tried=len(refused) + 1)
        if certificate.holds():
            made = replace(found, certificate=certificate, digest=key, state=state_of(network))
            keeping.keep(KIND, made)
            return made
        refused.append(certificate)
    why = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    if not refused:
        raise ValueError(f"{called(network)} can't be quantised: {why}")
    best = nearest(refused)
    found = (
        f"int8 is refused for {called(network)}: of {len(refused)} candidates the nearest to float32 has {best.shares()} on "
        f"{best.images} held-out images, and the tolerance asks for a {tolerance}" + (f" ({why})" if why else "")
    )
    raise NotCertified(f"{found}. Give more calibration images, or a wider tolerance=, or use dtype=torch.bfloat16", refused, found)


def digest(network: nn.Module, images: Images, tolerance: Tolerance, classifies: bool) -> str:
    """Name what a quantised network follows from: weights, operators, images, tolerance, versions, processor."""
    made = blake3(f"{FORMAT} {type(network).__qualname__} {network} {images.digest} {tolerance} {classifies}\n".encode())
    versions = [f"{name} {version_of(name)}" for name in ("torch", "openvino", "nncf", "onnxruntime")]
    made.update(f"{machine('openvino')} {versions}\n".encode())
    made.update(f"{state_of(network)} {_computes(network, images.check[:1])}\n".encode())
    return made.hexdigest()[:32]


def _computes(network: nn.Module, image: Tensor) -> str:
    """Name the operators that a network runs, with their numbers; of one that can't be traced the settings of its layers."""
    try:
        graph = trace(network, *in_own_dtype(network, ((image,), {})))
    except Exception as error:  # which is said where it is planned
        settings = [
            (name, sorted((key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str)))
            for name, module in network.named_modules()
        ]
        return f"{first_line(error)} {settings}"
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    said = [repr((node.said(), [numbers[source] for source in node.inputs], _value(node))) for node in graph.nodes]
    return "\n".join([*said, repr([numbers.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in graph.outputs])])


def _value(node: Node) -> str:
    """Name a constant and its values, for it may be no parameter."""
    held = node.attrs.get("tensor")
    return f"{node.attrs.get('name')} {digest_of(held.detach().cpu())}" if isinstance(held, Tensor) and held.numel() else ""


def _candidates(
    network: nn.Module, images: Images, form: Form, reference: Reference, tolerance: Tolerance, say: Say, failed: dict[str, str]
) -> Iterator[Quantized]:
    """Quantise in one way after the other, each with its certificate; what fails is noted."""
    if missing := by_nncf.absent():
        failed["NNCF"] = missing
    else:
        try:
            yield from _by_nncf(network, images, form, reference, tolerance, say)
        except Exception as error:  # a library fails in any way whatever, and there is another
            failed["NNCF"] = first_line(error)
    if missing := by_onnxruntime.absent():
        failed["onnxruntime"] = missing
        return
    try:
        say("quantising by onnxruntime")
        graph, outputs = by_onnxruntime.quantize(network, images.calibration, form)
        seven = ", weights in 7 bits" if by_onnxruntime.saturates() else ""
        by = f"onnxruntime {version_of('onnxruntime')}, static, per channel{seven}"
        yield _certified("onnxruntime", graph, b"", outputs, "float32", by, images, form, reference, tolerance)
    except Exception as error:
        failed["onnxruntime"] = first_line(error)


def _by_nncf(network: nn.Module, images: Images, form: Form, reference: Reference, tolerance: Tolerance, say: Say) -> Iterator[Quantized]:
    say("exporting")
    single = by_nncf.Float(network, images.calibration, form)
    outputs = single.exported.outputs
    rest = "bfloat16" if openvino.precision(torch.bfloat16) is torch.bfloat16 else "float32"
    versions = f"OpenVINO {version_of('openvino')}, NNCF {version_of('nncf')}"

    def candidate(model: Any, how: str, kept: tuple[str, ...] = ()) -> Quantized:
        graph, weights, named = by_nncf.saved(model, outputs, getattr(torch, rest))
        by = f"{versions}, {how}, what stays in float in {rest}"
        return _certified("openvino", graph, weights, named, rest, by, images, form, reference, tolerance, kept)

    best: tuple[float, Any, bool] | None = None
    for whole, how in ((False, "mean ranges"), (True, "whole ranges")):
        say(f"quantising by NNCF, {how}")
        model = single.quantize(images.calibration, whole=whole)
        found = candidate(model, f"{how}, fast bias correction")
        if best is None or found.certificate.error < best[0]:
            best = found.certificate.error, model, whole
        yield found
    assert best is not None
    _, first, whole = best
    how = "whole ranges" if whole else "mean ranges"

    def run(model: Any) -> Callable[[Tensor], list[Tensor]]:
        plain = Form(None, tuple(torch.float32 for _ in outputs))
        built: Any = openvino.compiled(model.clone(), ("input_0",), outputs, plain, torch.float32)
        return lambda given: answers(built.flat, given)

    say("measuring what each layer loses")
    ranked = single.layers_by_effect(first, images.calibration[:RANKED], run)
    for count in KEEP:
        if count > max(1, len(ranked) // 3):
            break
        say(f"quantising by NNCF, {count} layers in float")
        kept = tuple(ranked[:count])
        named = tuple(single.named.get(name, name) for name in kept)
        yield candidate(single.quantize(images.calibration, whole=whole, keep=kept), f"{how}, fast bias correction", named)
    say("quantising by NNCF, with full bias correction")
    yield candidate(single.quantize(images.calibration, fast=False, whole=whole), f"{how}, full bias correction")


def _certified(
    engine: str,
    graph: bytes,
    weights: bytes,
    outputs: tuple[str, ...],
    rest: str,
    by: str,
    images: Images,
    form: Form,
    reference: Reference,
    tolerance: Tolerance,
    kept: tuple[str, ...] = (),
) -> Quantized:
    """Run what is quantised on the held-out images, and write the certificate."""
    here = machine(engine)
    blank: Any = None
    made = Quantized(engine, graph, weights, tuple(images.check.shape[1:]), outputs, rest, blank, here, images.check[:0], (), (), "")
    built: Any = made.build(form)
    found = answers(built.flat, images.check)
    cpu = f"{here.partition(';')[0]} ({', '.join(instructions()) or 'no instructions for int8'})"
    more: dict[str, Any] = {"unproven": images.made_up, "kept": kept, "cpu": cpu}
    certificate = compare(reference, found, "int8", by, tolerance, calibrated=len(images.calibration), digest=images.check_digest, **more)
    some = slice(WITNESSES)
    witnessed = tuple(one[some].clone() for one in reference.outputs), tuple(one[some].clone() for one in found)
    return replace(made, certificate=certificate, witness=images.check[some].clone(), right=witnessed[0], certified=witnessed[1])


def classifies(network: nn.Module) -> bool:
    """Tell whether a row of numbers for each image is logits, as far as the network says: embeddings are none."""
    record = getattr(network, "checkpoint", None)
    return not getattr(record, "embedding", False) and not getattr(network, "taps", None)
