"""Post-training quantisation by NNCF, for OpenVINO: per channel, with bias correction, layers that hurt left in float."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.engines import openvino, pytorch
from zoo.kernels.engines.export import Form, export
from zoo.kernels.engines.keep_nan import WATCH, keep_nan

FEW = 150
"""Calibration images below which each is taken mirrored too."""
LAYERS = {"Convolution", "GroupConvolution", "MatMul", "ConvolutionBackpropData", "GroupConvolutionBackpropData"}


def absent() -> str:
    """Say what is not installed; "" where all is there."""
    from zoo.kernels.quantizing.quantized import version_of

    missing = [name for name in ("openvino", "nncf", "onnx") if version_of(name) == "absent"]
    return f"{', '.join(missing)} is not installed: pip install 'kernelzoo[int8]'" if missing else ""


class Float:
    """A network as OpenVINO's graph in float32, for one image, BatchNorms folded: what is quantised."""

    def __init__(self, network: nn.Module, example: Tensor, form: Form) -> None:
        given = (example[:1].float(),)
        self.exported = export(pytorch.fold(network, given), given, form)
        self.model, self.held = openvino.read(self.exported)
        from openvino import _offline_transformations as passes

        before = [self._module(op) for op in _layers(self.model, any_weight=True)]
        with contextlib.suppress(AttributeError):  # what `openvino.convert_model` does to any graph
            passes.apply_moc_transformations(self.model, cf=False)
        after = [op.get_friendly_name() for op in _layers(self.model, any_weight=True)]
        self.named = dict(zip(after, before, strict=True)) if len(before) == len(after) else {}
        """The network's own names of layers, by the graph's, which a fusion may have changed."""

    def _module(self, layer: Any) -> str:
        """Name the module whose weight a layer multiplies by."""
        todo = [layer.input_value(1).get_node()]
        while todo:
            node = todo.pop()
            if node.get_type_name() == "Constant" and node.get_friendly_name() in self.exported.tensors:
                return node.get_friendly_name().removeprefix("network.").removesuffix(".weight")
            todo += [port.get_node() for port in node.input_values()]
        return layer.get_friendly_name()

    def quantize(self, images: Tensor, *, fast: bool = True, whole: bool = False, keep: Sequence[str] = ()) -> Any:
        """Return the quantised `ov.Model`.

        Args:
            images: to calibrate on, (N, C, H, W).
            fast: corrects biases by the shift of their mean, layer by layer; else by running the quantised layers before each.
            whole: takes the range of an activation over all images; else the mean of the images' own ranges, which cuts off outliers.
            keep: names of layers that stay in float.
        """
        nncf = imported()
        images = mirrored(images)
        options: dict[str, Any] = {"ignored_scope": nncf.IgnoredScope(names=list(keep))} if keep else {}
        if whole:
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet as Ranges

            options["advanced_parameters"] = nncf.AdvancedQuantizationParameters(activations_range_estimator_params=Ranges.MINMAX)
        with quiet(), openvino.silent_telemetry(), torch.no_grad():
            return nncf.quantize(
                self.model,
                nncf.Dataset([image[None].numpy() for image in images]),
                subset_size=len(images),
                preset=nncf.QuantizationPreset.MIXED,  # activations that a ReLU does not bound below need a zero point
                fast_bias_correction=fast,
                **options,
            )

    def layers_by_effect(self, quantized: Any, images: Tensor, run: Callable[[Any], Callable[[Tensor], list[Tensor]]]) -> list[str]:
        """Name the quantised layers, the one first whose return to float32 brings the answers nearest to float32's.

        Args:
            quantized: what `quantize` returned.
            images: to measure on; none that a certificate is about.
            run: compiles a model.
        """
        ov = openvino.imported()
        right, originals = run(self.model)(images), {op.get_friendly_name(): op for op in self.model.get_ordered_ops()}
        found: list[tuple[float, str]] = []
        for name in [op.get_friendly_name() for op in _layers(quantized)]:
            twin = quantized.clone()
            layer = next(op for op in twin.get_ordered_ops() if op.get_friendly_name() == name)
            source = layer.input_value(0)
            if source.get_node().get_type_name() == "FakeQuantize":
                layer.input(0).replace_source_output(source.get_node().input_value(0))
            weight = originals[name].input_value(1).get_node() if name in originals else None
            if weight is not None and weight.get_type_name() == "Constant":
                layer.input(1).replace_source_output(ov.op.Constant(weight.data.copy()).output(0))
            off = max(_distance(a, b) for a, b in zip(run(twin)(images), right, strict=True))
            found.append((off, name))
        return [name for _, name in sorted(found)]


def imported() -> Any:
    """Import NNCF without OpenVINO's telemetry, without its messages, and without its class for loggers that are made later."""
    loggers = logging.getLoggerClass()
    try:
        with quiet(), openvino.silent_telemetry():
            import nncf
    finally:
        logging.setLoggerClass(loggers)
    logging.getLogger("nncf").setLevel(logging.ERROR)  # nncf.set_log_level would also set handlers that others have put there
    return nncf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep NNCF's bars off stdout, and what PyTorch's compiler, which it loads, says of a missing GPU."""
    had = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(had)


def mirrored(images: Tensor) -> Tensor:
    """Return few images together with their mirror images, from which ranges are known better."""
    return torch.cat([images, images.flip(3)]) if len(images) < FEW else images


def saved(model: Any, outputs: tuple[str, ...], rest: torch.dtype) -> tuple[bytes, bytes, tuple[str, ...]]:
    """Return an `ov.Model` as IR, the graph and the weights, and the names of its outputs: `WATCH` last, where NaN could be lost.

    Args:
        model: quantised; not changed.
        outputs: names of what the network returns.
        rest: what stays in float computes in.
    """
    ov, model = openvino.imported(), model.clone()
    outputs = (*outputs, WATCH) if keep_nan(model, rest) else outputs
    with tempfile.TemporaryDirectory(prefix="zoo-int8-") as folder:
        graph, weights = Path(folder) / "network.xml", Path(folder) / "network.bin"
        ov.serialize(model, str(graph), str(weights))
        return graph.read_bytes(), weights.read_bytes(), outputs


def _layers(model: Any, any_weight: bool = False) -> list[Any]:
    """List the layers whose weights are quantised, or all."""
    layers = [op for op in model.get_ordered_ops() if op.get_type_name() in LAYERS]
    return [op for op in layers if any_weight or op.input_value(1).get_node().get_type_name() != "Constant"]


def _distance(ours: Tensor, right: Tensor) -> float:
    return ((ours - right).norm() / right.norm().clamp_min(1e-30)).item()
