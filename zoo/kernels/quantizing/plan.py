"""A plan in int8 on a CPU: the quantised network for calls of the size that it was certified for, float32 for all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import in_own_dtype, own_dtype
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.engines.build import OfTensors, apart_in, build_cpu, evaluating, key_of, output_shape, runner
from zoo.kernels.engines.engine import Engine, Plain
from zoo.kernels.engines.export import Form
from zoo.kernels.engines.judge import error as relative_error
from zoo.kernels.engines.race import Trial, fastest, turn, undisturbed
from zoo.kernels.measuring.stopwatch import phase
from zoo.kernels.passes.trace import trace
from zoo.kernels.quantizing.quantized import LEAST, SAME_ANSWERS, Quantized
from zoo.kernels.reports.built_plan import Built
from zoo.kernels.reports.progress_bar import bar
from zoo.kernels.reports.report import PlanReport, Row
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.request import Request

BUDGET = 4.0
"""Seconds to spend on timing a batch as one against image by image."""


def build_int8(quantized: Quantized, request: Request) -> Built:
    """Answer calls of the certified size in int8, a batch as one or image by image, whichever is faster; others in float32."""

    def single(why: str) -> Built:
        built = build_cpu(request)
        built.report.notes.append(f"computed in float32: {why}")
        return built

    network, choices = request.network, request.choices
    given_args, given_kwargs = in_own_dtype(network, (request.args, request.kwargs))
    leaves, spec = pytree.tree_flatten((given_args, given_kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    size = "x".join(map(str, quantized.shape))
    if len(leaves) != 1 or len(tensors) != 1 or not tensors[0].is_floating_point():
        return single(f"int8 was certified for images of {size} alone, as the only argument")
    shape = tuple(tensors[0].shape)
    if shape[1:] != quantized.shape or shape[0] == 0:
        return single(f"int8 was certified for images of {size} alone")
    if quantized.broken:
        return single(quantized.broken)
    own = own_dtype(network)
    with phase("tracing"):
        graph = trace(network, given_args, given_kwargs)
        fits = apart_in(network, given_args, given_kwargs, graph) if shape[0] > 1 else None
    if shape[0] > 1 and (fits is None or not fits(1)):
        return single("it does not answer image by image, and int8 was certified so")
    model = OfTensors(evaluating(network), leaves, spec)
    example = (natural_images(shape, tensors[0].device).to(own),)
    with torch.no_grad():
        form = Form.of(model(example[0][:1]))
    key = f"int8 {quantized.digest} {key_of(network, graph, own, torch.int8, [shape])}"
    known = choices.get(key)
    with bar("choosing kernels", request.options.progress) as progress, phase("making and timing engines"):
        say: Callable[[str], None] = (lambda text: None) if progress is None else (lambda text: progress(0, 1, text))
        trial = Trial(_same(quantized, form, example[0]), say)
        for engine in sorted(_engines(quantized, form, shape[0]), key=lambda one: known is None or one.name != known.op):
            if known is None or known.op not in trial.calls:  # what has won before comes first, and needs no other beside it
                trial.admit(engine)
        if not trial.calls:
            return single("; ".join(f"{name}: {reason}" for name, reason in trial.refused.items()))
        if known is not None and known.op in trial.calls:
            seconds, winner, replaced = {known.op: known.us / 1e6}, known.op, known.aten_us
        else:
            seconds, winner = fastest(trial, example, BUDGET)
            replaced = 0.0
        itself = Plain(model)
        if not replaced:
            itself(*example)  # the first call prepares, for longer than it computes
            replaced = 1e6 * undisturbed(turn(itself, example))
    choices.put(key, Choice(winner, {}, 1e6 * seconds[winner], replaced, len(seconds)))
    choices.save()
    row = Row("the whole network", winner, output_shape(graph), 1e6 * seconds[winner], replaced)
    row.note = "; ".join(f"{name}: {reason}" for name, reason in trial.refused.items())
    report = PlanReport([shape], [row], None, quantized.proof.lines())
    return Built(runner(trial.calls[winner], itself, model, graph, own, report), graph.spec, report)


def _engines(quantized: Quantized, form: Form, batch: int) -> list[Engine]:
    """List the ways to run a batch, that which was certified first."""
    name = f"{quantized.engine} int8"
    rest = getattr(torch, quantized.rest)
    one = Engine(name if batch == 1 else f"{name}/1", rest, True, lambda: quantized.build(form, batch))
    if batch == 1 or quantized.engine != "openvino":
        return [one]
    return [one, replace(one, name=name, make=lambda: quantized.build(form, batch, whole=True))]


def _same(quantized: Quantized, form: Form, example: Tensor) -> Callable[[Callable[..., Any], torch.dtype], tuple[float, float]]:
    """Return what compares a way to run it with the certified one, image by image."""
    one = quantized.build(form)
    parts = [pytree.tree_leaves(one(image[None])) for image in example]
    right = [torch.cat([leaf for leaf in column if isinstance(leaf, Tensor)]) for column in zip(*parts, strict=True)]

    def bound(call: Callable[..., Any], dtype: torch.dtype) -> tuple[float, float]:
        found = [leaf for leaf in pytree.tree_leaves(call(example)) if isinstance(leaf, Tensor)]
        return relative_error([found], [right]), max(LEAST, SAME_ANSWERS * quantized.certificate.error)

    return bound
