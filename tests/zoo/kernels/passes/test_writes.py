"""What a network writes in place: through views it is followed, in what is kept from call to call it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.mapped import counted, program
from zoo.kernels.comparing.parity import Reference
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.plan import Plan


def test_a_network_that_keeps_what_it_writes_to_is_refused_as_before() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            first = y[:, :1]
            first.add_(1)
            self.before = y
            return y * 2

    with pytest.raises(Untraceable, match="wrote in place"):
        understand(Keeping(), (torch.randn(2, 3, 4, 4),), {})


def test_a_buffer_that_is_written_through_a_view_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, 0].add_(1)
            self.seen[:1].add_(1)  # pyright: ignore[reportIndexIssue, reportArgumentType]
            return y

    with pytest.raises(Untraceable, match="changes seen in every call"):
        understand(Counting(), (torch.randn(2, 3, 4, 4),), {})


@pytest.mark.parametrize("kept", ["returned", "alone"])
def test_what_is_returned_shows_what_was_written_through_a_view(kept: str, device: torch.device) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.bias = nn.Conv2d(3, 8, 1), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y[:, :4].mul_(2)
            return y if kept == "returned" else y.permute(0, 2, 3, 1) + self.bias

    network, x = Written().eval().to(device), torch.randn(2, 3, 4, 4, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(Plan(program(network, x)).eager([x])[0], network(x), rtol=1e-4, atol=1e-5)


def test_an_operator_that_is_told_where_to_write_leaves_the_input_as_it_was(device: torch.device) -> None:
    class Out(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.clone()
            return torch.mul(y, 3, out=y), x * 2

    x = torch.randn(2, 3, 4, 4, device=device)
    with torch.inference_mode():
        tripled, doubled = Plan(program(Out(), x)).eager([x.clone()])
    torch.testing.assert_close(tripled, 3 * x)
    torch.testing.assert_close(doubled, 2 * x)


class Replacing(nn.Module):
    """Counts its calls in a buffer that is another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0].add_(1)
        self.count = self.count + 1
        return y * self.count


def test_a_buffer_that_is_replaced_is_refused_without_a_write_too(device: torch.device) -> None:
    class Counting(Replacing):
        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x * self.count

    class Caching(Replacing):
        def forward(self, x: Tensor) -> Tensor:
            self.count = x.new_ones(1)
            return x * self.count

    x = torch.randn(2, 3, 4, 4, device=device)
    with pytest.raises(Untraceable, match="reads count and puts another"):
        understand(Counting().to(device), (x,), {})
    assert counted(understand(Caching().to(device), (x,), {})[0]).total() == 1


def test_what_is_compared_with_is_computed_of_images_as_they_were(device: torch.device) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] += 1
            return self.first(x)

    x = torch.randn(2, 3, 4, 4, device=device)
    before = x.clone()
    found = Reference(Writing().eval(), device, torch.bfloat16, False, [((x,), {})])
    assert torch.equal(x, before)
    assert found.eager < 0.05


class Windowed(nn.Module):
    """Writes into windows with pixels between them, which PyTorch's own rewriting of such writes forgets."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.unfold(2, 2, 3)[..., 0].add_(1)
        return y * 1


class Drawing(nn.Module):
    """Writes through a view, and drops."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0].add_(1)
        return F.dropout(y * 1, 0.5, training=True)


@pytest.mark.parametrize(("network", "said"), [(Replacing(), "buffer"), (Windowed(), "windows"), (Drawing(), "random")])
def test_what_rewriting_would_hide_is_refused(network: nn.Module, said: str, device: torch.device) -> None:
    before = {name: tensor.clone() for name, tensor in network.named_buffers()}
    with pytest.raises(Untraceable, match=said) as told:
        understand(network.to(device), (torch.randn(2, 3, 6, 6, device=device),), {})
    assert told.value.anyway
    assert all(torch.equal(tensor, before[name].to(device)) for name, tensor in network.named_buffers())
