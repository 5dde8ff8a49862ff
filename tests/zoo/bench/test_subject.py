"""What is measured: weights, images and statistics are the same every time, and an error says something."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.bench import subject
from zoo.bench.subject import Subject
from zoo.kernels.comparing.sample_images import natural_images

CPU = torch.device("cpu")
TINY = zoo.CATALOGUE["ResNet20"]


def test_batchnorms_get_statistics_that_are_worth_folding(small: Subject) -> None:
    norms = [layer for layer in small.own.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 19
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.running_mean.abs().max() > 0.01
        assert norm.running_var.min() > 0
        assert not norm.training
        assert norm.momentum == 0.1
    assert 0.01 < float(small.reference.std()) < 100


def test_a_subject_is_the_same_every_time(small: Subject) -> None:
    again = subject.subject(TINY, 2, CPU, torch.float32)
    assert torch.equal(again.input(torch.float32), small.input(torch.float32))
    torch.testing.assert_close(again.reference, small.reference)


@pytest.mark.parametrize(("batch", "batches"), [(1, 16), (3, 6), (16, 1), (20, 1)])
def test_answers_are_compared_on_sixteen_images_or_more(batch: int, batches: int) -> None:
    s = subject.subject(TINY, batch, CPU, torch.float32)
    images = s.input(torch.float32)
    before, seen = images.clone(), list[Tensor]()

    def call() -> Tensor:
        seen.append(images.clone())
        with torch.no_grad():
            return s.peer(images)

    assert s.reference.shape == (batch * batches, 10)
    assert subject.relative_error(s.answers(call), s.reference) < 1e-5
    assert len(seen) == s.batches == batches
    assert len({one.sum().item() for one in seen}) == batches
    assert torch.equal(seen[0], before)
    assert torch.equal(images, before)


def test_answers_can_be_asked_for_after_the_reference() -> None:
    s = subject.subject(TINY, 2, CPU, torch.float32)
    assert s.reference.shape == (16, 10)
    with torch.no_grad():
        assert subject.relative_error(s.answers(lambda: s.peer(s.input(torch.float32))), s.reference) < 1e-5


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        *((name, "torchvision") for name in ("SqueezeNet1_1", "GoogLeNet", "RegNetY_400MF", "MNASNet0_5")),
        ("ResNet20", "zoo"),
    ],
)
def test_the_peer_has_our_weights(name: str, twin: str) -> None:
    own = zoo.CATALOGUE[name]().eval()
    peer, whose = subject._twin(own)
    assert whose == twin
    ours, theirs = own.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (peer is own) == (twin == "zoo")


def test_a_deep_networks_rounding_errors_leave_its_answer_to_be_told() -> None:
    cls = zoo.CATALOGUE["EfficientNetB5"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = cls().eval()
    subject.settle(network, natural_images((8, 3, 128, 128), CPU, seed=subject.IMAGES + 1))
    images = natural_images((8, 3, 128, 128), CPU, seed=subject.IMAGES)
    with torch.inference_mode():
        reference = network(images)
        error = subject.relative_error(network.bfloat16()(images.bfloat16()), reference)
    assert error < 0.3  # 0.7 where the statistics are a tenth of a deviation off, and each of a hundred layers adds its own


def test_what_the_ways_are_compared_with_is_computed_elsewhere(small: Subject) -> None:
    """Where PyTorch keeps cuDNN's first guess at a convolution for a thread, a way that may search would find it."""
    threads: list[threading.Thread] = []
    hook = small.peer.register_forward_hook(lambda *given: threads.append(threading.current_thread()))
    try:
        made = Subject(*(getattr(small, name) for name in ("name", "batch", "size", "device", "dtype", "own", "peer", "twin")))
        _ = made.reference, made.plain_error
    finally:
        hook.remove()
    assert len(threads) >= 2
    assert threading.current_thread() not in threads
