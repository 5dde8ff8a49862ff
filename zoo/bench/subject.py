"""What is measured: one network at one batch, with the same weights on both sides, its inputs, its reference and its limit."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zoo.kernels.comparing.precision import products
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.measuring.fresh_thread import elsewhere
from zoo.networks.model import Model

CHUNK = 32
"""Images at a time where an answer and not its speed is wanted: the reference must fit where the fastest way fits."""
IMAGES = 100
"""Seed of the pictures: other than those that plans are checked and rounded with, which count from 0."""
OFF = 0.03
"""Deviations by which BatchNorms' means are off. A tenth makes an EfficientNetB5's maps, with random weights, a hundred times larger: there
plain eager's own error in bfloat16 is 0.7, and tells nothing."""
HIDES = 1e-3
"""Greatest number of a weight that hides what is before it: heads of zeros, and scales that begin at 1e-4 or less."""
PROVEN = 16
"""Images that an answer is compared on, at least: the error of a single one scatters by more than is allowed."""
SETTLING = 8
"""Images that BatchNorm's statistics are taken from."""


@dataclass
class Subject:
    """A network at one batch, and the same network as a peer ships it, both float32 on the CPU and in eval mode.

    Attributes:
        name: of the network.
        batch: images in a call.
        size: side of the images in pixels.
        device: where it is measured.
        dtype: what it is measured in.
        own: the network that is made fast, the zoo's where it is a network of the zoo.
        peer: torchvision's or timm's module with the same weights, or `own` where neither has one.
        twin: "torchvision", "timm" or "zoo": whose module `peer` is.
        channels: of the images.
    """

    name: str
    batch: int
    size: int
    device: torch.device
    dtype: torch.dtype
    own: nn.Module
    peer: nn.Module
    twin: str
    channels: int = 3
    _inputs: dict[tuple[torch.dtype, bool], Tensor] = field(default_factory=dict)

    def input(self, dtype: torch.dtype, channels_last: bool = False) -> Tensor:
        """Return the images, (batch, C, size, size), on the device; one tensor a dtype and memory format."""
        if (dtype, channels_last) not in self._inputs:
            with torch.inference_mode(False):  # others are put there later, by whoever asks
                kept = self._pictures(0).to(self.device, dtype, memory_format=_format(channels_last))
            self._inputs[dtype, channels_last] = kept
        return self._inputs[dtype, channels_last]

    def _pictures(self, number: int) -> Tensor:
        """Make a batch on the CPU, float32; the first is what is measured."""
        seed = IMAGES + number + (number > 0)  # the one between is that of the statistics
        return natural_images((self.batch, self.channels, self.size, self.size), torch.device("cpu"), seed=seed)

    def answers(self, call: Callable[[], Tensor]) -> Tensor:
        """Return what a way that reads `input` answers to `PROVEN` images or more, a batch after the other; shaped as `reference`."""
        found = []
        for number in range(self.batches):
            self._show(number)
            found.append(call().detach().clone())
        self._show(0)
        return torch.cat(found)

    def _show(self, number: int) -> None:
        """Put a batch of pictures where the ways read theirs."""
        if self.batches > 1:
            pictures = self._pictures(number)
            for kept in self._inputs.values():
                kept.copy_(pictures)

    @property
    def batches(self) -> int:
        """How many batches answers are compared on."""
        return max(1, -(-PROVEN // self.batch))

    def prepare(self) -> None:
        """Make all that the ways share, reference and images, so that no way is charged for it."""
        _ = self.reference, self.plain_error
        for channels_last in (False, True):
            self.input(self.dtype, channels_last)

    def placed(self, module: nn.Module, dtype: torch.dtype, channels_last: bool = False) -> nn.Module:
        """Return a copy of a module on the device, in a dtype and memory format."""
        return copy.deepcopy(module).to(self.device, dtype).to(memory_format=_format(channels_last)).eval()

    @functools.cached_property
    def reference(self) -> Tensor:
        """Logits (`batches` * batch, classes) of the peer in float32 eager, without TF32."""
        return self._answer(torch.float32)

    @functools.cached_property
    def plain_error(self) -> float:
        """Relative error of plain eager in the measured dtype: what rounding alone does to this network.

        In float32 it is channels_last's, which adds the same products in another order.
        """
        return relative_error(self._answer(self.dtype, channels_last=self.dtype == torch.float32), self.reference)

    def _answer(self, dtype: torch.dtype, channels_last: bool = False) -> Tensor:
        with elsewhere() as do:  # where the ways, which search, don't find what was guessed
            return do(lambda: self._answered(dtype, channels_last))

    def _answered(self, dtype: torch.dtype, channels_last: bool) -> Tensor:
        network = self.placed(self.peer, dtype, channels_last)
        with torch.inference_mode(), products(tf32=False):  # cuDNN's search would take longer than the answer
            first = self.input(torch.float32)
            images = torch.cat([first, *(self._pictures(number).to(first) for number in range(1, self.batches))])
            parts = [network(part.to(dtype, memory_format=_format(channels_last))).float() for part in images.split(CHUNK)]
            return torch.cat(parts)


def subject(cls: type[Model], batch: int, device: torch.device, dtype: torch.dtype) -> Subject:
    """Build a network untrained, give its BatchNorms statistics that are worth folding, and its weights to the peer.

    Args:
        cls: a network of the catalogue.
        batch: images in a call.
        device: where it will be measured.
        dtype: what it will be measured in.

    Returns:
        The subject; the same weights and images at every call. The images are like photographs, and so are those of the statistics: with
        statistics of noise a picture's activations explode in a deep SEResNet, and its rounding errors with them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = cls().eval()
    size = cls.input_size
    settle(own.to(device), natural_images((SETTLING, own.in_channels, size, size), device, seed=IMAGES + 1))
    own.cpu()
    peer, twin = _twin(own)
    return Subject(cls.__name__, batch, size, device, dtype, own, peer, twin, own.in_channels)


def settle(network: nn.Module, images: Tensor) -> None:
    """Give a fresh network numbers that a trained one could have, in place, so that its answers depend on every layer and image.

    As they are initialised, BatchNorms do nothing, and a fold that forgets them would pass; statistics drawn freely would let a deep
    network's activations die or explode, and its rounding errors with them. So every BatchNorm gets the statistics of some images, its
    own scale and shift, and some distance from both. A head or a gate of zeros, a layer scale of 1e-6 and a last norm of zeros hide what
    is before them: such constants are drawn too.

    Args:
        network: on any device.
        images: (B, C, H, W) on the same device, float32.
    """
    generator = torch.Generator().manual_seed(3)
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.weight.data.copy_(torch.empty(norm.num_features).uniform_(0.5, 1.5, generator=generator))
        norm.bias.data.copy_(torch.empty(norm.num_features).normal_(0, 0.1, generator=generator))
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches, of which there is one
        norm.train()
    for name, parameter in network.named_parameters():
        if parameter.numel() and not name.endswith("bias") and float(parameter.detach().abs().max()) < HIDES:
            vector = parameter.numel() == max(parameter.shape)  # a scale of channels, whatever its shape
            deviation = 0.5 if vector else parameter[0].numel() ** -0.5
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0, deviation, generator=generator))
    with torch.no_grad(), products(tf32=False), elsewhere() as do:
        do(lambda: network(images))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        mean, var = norm.running_mean, norm.running_var
        if mean is None or var is None:
            continue
        var.clamp_(min=0.01 * float(var.mean()))
        mean.add_(var.sqrt() * torch.empty(norm.num_features).normal_(0, OFF, generator=generator).to(var.device))
        var.mul_(torch.empty(norm.num_features).uniform_(0.8, 1.25, generator=generator).to(var.device))
    network.eval()


def torchvision_builder(model: type[Model]) -> Callable[..., nn.Module] | None:
    """Return torchvision's constructor of the same network, untrained, or None where it has none."""
    import torchvision

    folded = model.__name__.lower().replace("_", "")
    for name in torchvision.models.list_models(module=torchvision.models):
        if name.replace("_", "") == folded:
            return torchvision.models.get_model_builder(name)
    return None


def _twin(own: Model) -> tuple[nn.Module, str]:
    """Find torchvision's or timm's module of exactly these names and shapes, and give it these weights."""
    builder, name = torchvision_builder(type(own)), type(own).__name__.lower()
    candidates: list[tuple[str, Callable[[], nn.Module]]] = []
    if builder is not None:
        auxiliary = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inceptionv3") else {}
        candidates.append(("torchvision", lambda: builder(**auxiliary)))
    else:
        try:
            import timm

            candidates.append(("timm", lambda: timm.create_model(name)))
        except ImportError:
            pass
    for whose, build in candidates:
        try:
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of names that timm has replaced
                    module = build()
            except NotImplementedError:  # torchvision computes RegNet's widths with tensors, which have no numbers there
                module = build()
            module.load_state_dict(own.state_dict(), assign=True)
        except RuntimeError:  # no such network, or other names
            continue
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return module.eval(), whose
    return own, "zoo"


def relative_error(answer: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over the reference's norm, in float64; NaN where the shapes differ."""
    if answer.shape != reference.shape:
        return math.nan
    right = reference.double()
    return float(torch.linalg.vector_norm(answer.to(right.device).double() - right) / torch.linalg.vector_norm(right))


@contextmanager
def tf32(in_convolutions: bool) -> Iterator[None]:
    """Let float32 convolutions use TF32, as PyTorch ships, or not; float32 products never do, as it ships. The flags are put back."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = in_convolutions, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format
