"""Post-training quantisation by onnxruntime: per channel, without bias correction. For where NNCF is absent, or keeps too little."""

from __future__ import annotations

import platform
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.engines import pytorch
from zoo.kernels.engines.export import Exported, Form, export
from zoo.kernels.engines.keep_nan import WATCH
from zoo.kernels.engines.keep_nan_onnx import watch
from zoo.kernels.quantizing.by_nncf import mirrored, quiet


def absent() -> str:
    """Say what is not installed; "" where all is there."""
    from zoo.kernels.quantizing.quantized import version_of

    missing = [name for name in ("onnxruntime", "onnx") if version_of(name) == "absent"]
    return f"{', '.join(missing)} is not installed: pip install 'kernelzoo[int8]'" if missing else ""


def quantize(network: nn.Module, images: Tensor, form: Form) -> tuple[bytes, tuple[str, ...]]:
    """Return an ONNX model for one image, with int8 between QuantizeLinear and DequantizeLinear, and the names of its outputs.

    Where NaN could be lost the last of them is `WATCH`.

    Args:
        network: in eval mode, on the CPU; its BatchNorms are folded.
        images: to calibrate on, (N, C, H, W).
        form: of what the network returns.
    """
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    given = (images[:1].float(),)
    exported = export(pytorch.fold(network, given), given, form)
    with tempfile.TemporaryDirectory(prefix="zoo-int8-") as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain, ready, made = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "made"))
        plain.write_bytes(_with_weights(exported))
        reader = _Reader(mirrored(images))
        with quiet():  # it advises what is done here
            quant_pre_process(plain, ready, skip_symbolic_shape=True)
            quantization.quantize_static(
                ready,
                made,
                reader,  # pyright: ignore[reportArgumentType]  # it has what is asked of one
                quant_format=quantization.QuantFormat.QDQ,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                reduce_range=saturates(),
            )
        model = onnx.load(made)
        watches = watch(model, {})
        return model.SerializeToString(), (*exported.outputs, *([WATCH] if watches else []))


def saturates() -> bool:
    """Tell whether this processor adds two products of bytes in 16 bits, which overflow unless weights have 7 bits: x86 without VNNI."""
    from zoo.kernels.quantizing.quantized import narrow_kinds

    if platform.machine().lower() not in ("x86_64", "amd64") or "int8" in narrow_kinds():
        return False
    known = getattr(torch.cpu, "_is_vnni_supported", None)  # where no Linux names the instructions
    return not (known and known())


class _Reader:
    """Hands images to onnxruntime one by one."""

    def __init__(self, images: Tensor) -> None:
        self.left = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next image; None behind the last."""
        image = next(self.left, None)
        return None if image is None else {"input_0": image[None].numpy()}


def _with_weights(exported: Exported) -> bytes:
    """Put the weights into the graph."""
    import onnx

    model = onnx.load_from_string(exported.graph)
    kept = []
    for given in model.graph.input:
        tensor = exported.tensors.get(given.name)
        if tensor is None:
            kept.append(given)
        else:
            model.graph.initializer.append(onnx.numpy_helper.from_array(tensor.contiguous().numpy(), given.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model.SerializeToString()
