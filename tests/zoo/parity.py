"""Two networks with the same tensors compute the same: logits, gradients and running statistics, in eval and in train mode."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
DRAWN = 1_000_003
"""Numbers drawn for a tensor; a longer one repeats them, at a length that no tensor's axes divide."""


def randomised(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Draw a tensor for every entry of a meta model's state, scaled so that signals neither die nor explode."""
    random = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, old in model.state_dict().items():
        new = torch.empty(old.shape, dtype=old.dtype)
        if name.endswith("num_batches_tracked"):
            state[name] = new.zero_()
        elif name.endswith("running_var"):
            state[name] = new.uniform_(0.5, 1.5, generator=random)
        elif old.dim() >= 2:
            few = torch.empty(min(new.numel(), DRAWN), dtype=old.dtype).normal_(0, (2 / old[0].numel()) ** 0.5, generator=random)
            state[name] = few if few.numel() == new.numel() else few.repeat(-(-new.numel() // DRAWN))[: new.numel()]
            state[name] = state[name].view(old.shape)
        else:
            state[name] = new.normal_(1 if name.endswith(("weight", ".scale")) else 0, 0.1, generator=random)
    return state


def relative(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Measure the difference's norm in the expected norm, or in `floor` where that is larger; NaN anywhere is infinitely far."""
    difference, scale = (actual - expected).detach().norm().item(), expected.detach().norm().item()
    if not math.isfinite(difference + scale):
        return math.inf
    return difference / max(scale, floor) if difference else 0.0


def step(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Return the outputs in train mode, and the gradients of the images and of every parameter; the seed is always the same."""
    images = images.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    outputs = model.train()(images)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(4))
    sum((output * weights).sum() for output in outputs).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    assert images.grad is not None
    return outputs, images.grad, gradients


def compare(
    make_ours: Callable[[], nn.Module],
    make_theirs: Callable[[], nn.Module],
    size: int,
    by_order: bool = False,
    statistics: bool = True,
    batch: int = 2,
) -> dict[str, float]:
    """Give both networks the same random tensors and return the worst relative errors.

    Args:
        make_ours: builds our network; called on the meta device.
        make_theirs: builds the reference library's.
        size: side of the images in pixels.
        by_order: pair the tensors in the order of the layers, where the names differ; else names and shapes must be equal.
        statistics: compare the running statistics after one training step.
        batch: number of images.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs may be deprecated
        ours, theirs = make_ours(), make_theirs()
    state = randomised(ours)
    names = dict(zip(state, theirs.state_dict(), strict=True)) if by_order else {name: name for name in state}
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert shapes.keys() == set(names.values())
    if not by_order:
        assert shapes == {name: tensor.shape for name, tensor in state.items()}
    # Parameters are shared, running statistics are each network's own.
    own = {
        names[name]: (tensor.clone() if "running" in name or "num_" in name else tensor).view(shapes[names[name]])
        for name, tensor in state.items()
    }
    ours.load_state_dict(state, assign=True)
    versioned = theirs.state_dict()  # it carries versions beside the tensors, which torchvision's MNASNet asks for
    versioned.update(own)
    theirs.load_state_dict(versioned, assign=True)
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))
    errors: dict[str, float] = {}

    with torch.inference_mode():
        logits, expected = ours.eval()(images), theirs.eval()(images)
    assert expected.isfinite().all()
    assert (expected[0] - expected[1]).norm() > 1e-3 * expected.norm()  # the logits depend on the image
    errors["eval"] = relative(logits, expected)

    outputs, image_gradient, gradients = step(ours, images)
    their_outputs, their_image_gradient, their_gradients = step(theirs, images)
    errors["train"] = max(relative(a, b) for a, b in zip(outputs, their_outputs, strict=True))
    errors["image gradient"] = relative(image_gradient, their_image_gradient)
    assert their_image_gradient.norm() > 0
    if statistics:
        after = theirs.state_dict()
        errors["statistics"] = max(
            (relative(tensor, after[names[name]]) for name, tensor in ours.state_dict().items() if "running" in name), default=0.0
        )
    if by_order:  # other operators round otherwise, which float32 gradients of tiny norm show: in float64 nothing excuses a difference
        _, _, gradients = step(ours.double(), images.double())
        _, _, their_gradients = step(theirs.double(), images.double())
    # A bias before a BatchNorm has no gradient but rounding; where the operators are the same, that is the same too.
    floor = 1e-9 * max(gradient.norm().item() for gradient in their_gradients.values()) if by_order else 0.0
    errors["gradients"] = max(
        relative(gradient, their_gradients[names[name]].view_as(gradient), floor) for name, gradient in gradients.items()
    )
    return errors


def assert_same_initialisation(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare every tensor's mean and deviation, within six times what the sampling of both makes likely."""
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        drawn, reference = (t.flatten()[:1_000_000].double() for t in (tensor, expected[name]))
        if (reference == reference[0]).all():
            assert torch.equal(drawn, reference), name
            continue
        likely = 6 * reference.std() / reference.numel() ** 0.5
        assert (drawn.mean() - reference.mean()).abs() < 2**0.5 * likely, name
        assert (drawn.std() - reference.std()).abs() < likely, name


def assert_equal(*args: Any, **options: Any) -> None:
    errors = compare(*args, **options)
    assert max(errors.values()) < TOLERANCE, errors
