"""Every entry of the catalogue has its published count, true attributes, and layers that hooks, exporters and odd images rely on."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deeper import every_size, kind
from parity import randomised
from torch import Tensor, nn

import zoo
from zoo import CATALOGUE, GoogLeNet, InceptionV3, MobileNetV1_025, Model, ResNet20, SEResNet18, SqueezeNet1_1
from zoo.variants import shapes

PROMISED = {
    "VGG": "11 13 16 19 11_BN 13_BN 16_BN 19_BN",
    "ResNet": "18 34 50 101 152 20 32 44 56 110",
    "ResNeXt": "50_32x4d 101_32x8d 101_64x4d",
    "WideResNet": "50_2 101_2",
    "SEResNet": "18 50 101 152",
    "SEResNeXt": "50_32x4d",
    "DenseNet": "121 161 169 201 264 _BC_100_12",
    "MobileNet": "V1 V1_075 V1_050 V1_025 V2 V2_140 V2_075 V2_050 V2_035 V3Large V3Small",
    "SqueezeNet": "1_0 1_1",
    "EfficientNet": "B0 B1 B2 B3 B4 B5 B6 B7",
    "EfficientNetV2": "_S _M _L _XL _B0 _B1 _B2 _B3",
    "MobileNetV4_Conv": "_Small _Small_050 _Small_035 _Medium _Large",
    "MobileNetV4_Hybrid": "_Medium _Large",
    "RegNetX": "_400MF _800MF _1_6GF _3_2GF _8GF _16GF _32GF",
    "RegNetY": "_400MF _800MF _1_6GF _3_2GF _8GF _16GF _32GF _128GF",
    "MNASNet": "0_5 0_75 1_0 1_3",
    "ConvNeXt": "_Atto _Femto _Pico _Nano _Tiny _Small _Base _Large _XLarge _XXLarge _Tiny_HNF _Large_MLP",
    "ConvNeXt_": "Atto_OLS Femto_OLS Pico_OLS Nano_OLS",
    "Swin": "_T _S _B _L _V2_T _V2_S _V2_B _V2_L",
    "ConvNeXtV2": "_Atto _Femto _Pico _Nano _Tiny _Base _Large _Huge",
    "Mixer": "_S32_224 _S16_224 _B32_224 _B16_224 _L32_224 _L16_224",
    "ResMLP": "_12_224 _24_224 _36_224 _Big_24_224",
    "GMLP": "_Ti16_224 _S16_224 _B16_224",
    "ConvMixer": "_768_32 _1024_20_KS9_P14 _1536_20",
    "GhostNet": "_050 _100 _130",
    "PoolFormer": "_S12 _S24 _S36 _M36 _M48",
    "PoolFormerV2": "_S12 _S24 _S36 _M36 _M48",
    "ConvFormer": "_S18 _S36 _M36 _B36",
    "CAFormer": "_S18 _S36 _M36 _B36",
    "ViT": "_Ti_16 _S_8 _S_16 _S_32 _B_8 _B_16 _B_32 _L_16 _L_32 _H_14",
    "DeiT": "_Ti_16 _S_16 _B_16 _Ti_16_Distilled _S_16_Distilled _B_16_Distilled",
    "DeiT3": "_S_16 _M_16 _B_16 _L_16 _H_14",
    "DINOv2": "_S_14 _B_14 _L_14 _G_14 _S_14_Reg4 _B_14_Reg4 _L_14_Reg4 _G_14_Reg4",
    "CLIP_ViT": "_B_32 _B_16 _L_14 _L_14_336 _B_32_QuickGELU _B_16_QuickGELU _L_14_QuickGELU _L_14_336_QuickGELU",
    "SigLIP": "_B_16 _L_16 _So400m_14",
}
EVERY_NAME = {family + variant for family, variants in PROMISED.items() for variant in variants.split()} | {
    *("AlexNet", "GoogLeNet", "InceptionV3", "InceptionV4", "InceptionResNetV2", "Xception", "NASNetAMobile", "NASNetALarge")
}


def smallest_of_each_family() -> list[type[Model]]:
    smallest: dict[type[Model], type[Model]] = {}
    for cls in sorted(CATALOGUE.values(), key=lambda cls: cls.params):
        smallest.setdefault(cls.family(), cls)
    return list(smallest.values())


def named(make: Any) -> str:
    return make.__name__ if isinstance(make, type) else "-".join([make.func.__name__, *map(str, make.keywords.values())])


MLPS = (zoo.Mixer_S32_224.family(), zoo.ResMLP, zoo.GMLP, zoo.ConvMixer)
FAMILIES = smallest_of_each_family()
# What a family's options add: other layers in other places
OPTIONS = [
    partial(SEResNet18),
    partial(ResNet20, shortcut="B"),
    partial(MobileNetV1_025, padding="same", activation="leaky_relu_0.1"),
    partial(GoogLeNet, transform_input=True),
]
TRACED = [*FAMILIES, *OPTIONS[2:]]
every_entry = pytest.mark.parametrize("cls", CATALOGUE.values(), ids=CATALOGUE)
OUTLINES = {(kind(cls), cls.first_layer, cls.classifiers): cls for cls in sorted(CATALOGUE.values(), key=lambda cls: -cls.params)}
every_outline = pytest.mark.parametrize(  # of networks that say the same of themselves and compute the same, the smallest
    "cls", [cls if cls in OUTLINES.values() else pytest.param(cls, marks=pytest.mark.long) for cls in CATALOGUE.values()], ids=CATALOGUE
)
every_arithmetic = pytest.mark.parametrize("make", [*FAMILIES, *OPTIONS], ids=lambda make: named(make))
TRACED_LONG = ("VGG11", "DenseNet_BC_100_12", "MaxViT_T", "DeiT_Ti_16", "DeiT3_S_16", "DINOv2_S_14", "CLIP_ViT_B_32", "SigLIP_B_16")
every_traced = pytest.mark.parametrize(  # but for those whose layers another has as well: AlexNet, DenseNet121, or that take long
    "make",
    [pytest.param(make, marks=pytest.mark.long) if named(make) in TRACED_LONG else make for make in TRACED],
    ids=lambda make: named(make),
)
SLOW = (
    *("DenseNet121", "DenseNet_BC_100_12", "InceptionV3", "GoogLeNet", "EfficientNetB0", "Xception", "MobileNetV3Small"),
    *("MobileNetV2_035", "ShuffleNetV2_x0_5", "VGG11", "AlexNet", "ResNet18", "RegNetY_400MF", "MNASNet0_5"),
    *("EfficientNetV2_B0", "MobileNetV4_Conv_Small_035", "InceptionV4", "InceptionResNetV2", "NASNetAMobile", "GhostNet_050"),
    *("Swin_T", "Swin_V2_T", "MaxViT_T", "PoolFormer_S12", "ConvFormer_S18", "CAFormer_S18"),
    *("ViT_Ti_16", "DeiT_Ti_16", "DeiT3_S_16", "DINOv2_S_14", "CLIP_ViT_B_32", "SigLIP_B_16"),
)
"""What the compiler and the exporter take seconds for, and more than a dozen of them; the others have a shortcut, a concatenation, a
padding that depends on the size, and a gate is among `tests/zoo/extraction/test_features.py`'s."""
every_compiled = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.long) if named(make).split("-")[0] in SLOW else make for make in TRACED],
    ids=lambda make: named(make),
)


def on_meta(make: Any, **options: Any) -> Model:
    with torch.device("meta"):
        return make(**options)


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return shapes(list(CATALOGUE))


def alive(make: Any, **options: Any) -> Model:
    """Build a network with random tensors that are quick to draw and pass signals on."""
    network = on_meta(make, **options)
    network.load_state_dict(randomised(network), assign=True)
    return network


def allowed(network: Model | type[Model], size: int) -> int:
    """The smallest side of at least `size` pixels that a network takes."""
    return -(-max(size, network.min_size) // network.size_multiple) * network.size_multiple


def images(network: Model, batch: int = 2, size: int = 32) -> Tensor:
    side = network.input_size if network.fixed_size else allowed(network, size)
    return torch.randn(batch, network.in_channels, side, side, generator=torch.Generator().manual_seed(0))


def leaves(network: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in network.named_modules() if not list(layer.children())}


def test_the_catalogue_has_what_was_promised() -> None:
    assert CATALOGUE.keys() >= EVERY_NAME
    assert all(getattr(zoo, name) is cls for name, cls in CATALOGUE.items())


def test_an_entry_is_one_line_under_its_papers_link() -> None:
    link = ""
    source = Path(zoo.catalogue.__file__).read_text()
    lines: dict[str, str] = {}
    for line in source.splitlines():
        link = line.rpartition(" ")[2] if line.startswith("# ") and "https://" in line else link
        if line.startswith("class "):
            assert re.fullmatch(r"class (\w+)\(.*, params=[\d_]+\): \.\.\.", line), line
            lines[line.removeprefix("class ").partition("(")[0]] = link
    assert list(lines) == list(CATALOGUE)
    for name, cls in CATALOGUE.items():
        assert re.fullmatch(r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|github\.com/tensorflow/tpu/tree/[\w/]+)", lines[name])
        # relatives of ResNet have papers of their own, and one family's class
        assert cls.paper == lines[name] or issubclass(cls, zoo.ResNet), name


@every_entry
def test_parameters_are_as_many_as_published_and_shaped_as_the_table_says(cls: type[Model], table: dict[str, Any]) -> None:
    network = on_meta(cls)
    assert sum(parameter.numel() for parameter in network.parameters()) == cls.params
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == table[cls.__name__]
    assert not [name for name, layer in network.named_modules() if getattr(layer, "inplace", False)]


@every_outline
def test_stem_and_classifiers_are_the_layers_that_channels_and_classes_shape(cls: type[Model]) -> None:
    options = {name: True for name in ("aux_logits",) if name in inspect.signature(cls).parameters}
    before, after = on_meta(cls, **options), on_meta(cls, num_classes=7, in_channels=5, **options)
    shapes = {name: tensor.shape for name, tensor in before.state_dict().items()}
    changed = {name.rpartition(".")[0] for name, tensor in after.state_dict().items() if tensor.shape != shapes[name]}
    assert changed == {cls.first_layer, *cls.classifiers}
    stem = after.get_submodule(cls.first_layer)
    assert isinstance(stem, nn.Conv2d)
    assert stem.in_channels == 5
    for name in cls.classifiers:
        assert 7 in (getattr(after.get_submodule(name), "out_features", 0), getattr(after.get_submodule(name), "out_channels", 0))
    assert (after.num_classes, after.in_channels) == (7, 5)


@every_size
def test_grey_images_of_odd_sizes_work(cls: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    network = on_meta(cls, num_classes=7, in_channels=1).eval()
    maps: list[Tensor] = []
    head = network.forward_head
    monkeypatch.setattr(network, "forward_head", lambda x: (maps.append(x), head(x))[1])
    sides = [cls.input_size] * 2 if cls.fixed_size else [allowed(cls, 97), allowed(cls, 65)]
    assert network(torch.empty(3, 1, *sides, device="meta")).shape == (3, 7)
    assert [x.dim() for x in maps] == [3 if cls.fixed_size else 4]  # tokens are bound to a size


@every_arithmetic
@pytest.mark.parametrize("in_channels", [pytest.param(1, marks=pytest.mark.long), 5])  # grey images are tried at odd sizes above
def test_other_channels_compute(make: Any, in_channels: int) -> None:
    network = alive(make, in_channels=in_channels, num_classes=7).eval()
    with torch.inference_mode():
        logits = network(images(network))
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1])


@every_size
def test_min_size_is_the_smallest_that_the_arithmetic_allows(cls: type[Model]) -> None:
    network = on_meta(cls).eval()
    if cls.fixed_size:
        with pytest.raises(ValueError, match=f"^{cls.__name__} takes images of {cls.input_size}x{cls.input_size} pixels alone"):
            network(torch.empty(1, 3, cls.input_size + 32, cls.input_size, device="meta"))
        return
    smallest = torch.empty(1, 3, cls.min_size, cls.min_size, device="meta")
    assert network(smallest).shape == (1, network.num_classes)
    for smaller in (smallest[:, :, 1:], smallest[:, :, :, 1:]):
        with pytest.raises(
            ValueError, match=rf"^{cls.__name__} needs images of at least {cls.min_size}x{cls.min_size} pixels, got .*; resize"
        ):
            network(smaller)
        if cls.min_size > cls.size_multiple:
            with pytest.raises(RuntimeError):
                network.forward_head(network.forward_body(smaller))


def test_input_sizes_are_allowed() -> None:
    assert not [name for name, cls in CATALOGUE.items() if cls.min_size > cls.input_size]


@every_entry
def test_argument_names_and_defaults_are_the_same_everywhere(cls: type[Model]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())
    assert [parameter.name for parameter in parameters[:2]] == ["num_classes", "in_channels"]
    assert parameters[0].default == (10 if cls.input_size == 32 else 1000)
    assert parameters[1].default == 3
    small = {"stem_stride", "early_stride"} if cls.family() is zoo.MobileNetV2.family() else set()
    known = small | {"num_classes", "in_channels", "dropout", "stride_on", "shortcut", "padding", "norm_eps", "activation", "ceil_mode"}
    assert {parameter.name for parameter in parameters} <= known | {
        "aux_logits",
        "bias",
        "transform_input",
        "stochastic_depth",
        "classifier_padding",
        "window",
        "last_window",
        "trained_window",
        "image_size",
        "pool",
    }


def test_dropout_is_an_argument_but_where_neither_paper_nor_checkpoint_has_it() -> None:
    without = {cls.family() for cls in CATALOGUE.values() if "dropout" not in inspect.signature(cls).parameters}
    resnets = {zoo.ResNet, zoo.CIFARResNet, zoo.Res2Net50D.family(), zoo.ResNet50V2.family(), zoo.ResNetV2_50x1_BiT.family()}
    windowed = {zoo.Swin, zoo.SwinV2, zoo.MaxViT}
    assert without == {*resnets, *windowed, *MLPS, zoo.ShuffleNetV2_x0_5.family(), zoo.RegNet, zoo.ConvNeXt, zoo.ConvNeXtV2}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of what reads constants: the position biases of Swin V2
@every_arithmetic
def test_every_layer_runs_once_and_is_hooked_without_harm(make: Any) -> None:
    network = alive(make).train()
    calls: Counter[str] = Counter()
    outputs: list[tuple[str, Tensor, int]] = []
    gradients: Counter[str] = Counter()

    def forward(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            calls[name] += 1
            outputs.append((name, output, output._version))

        return hook

    def backward(name: str) -> Any:
        def hook(layer: nn.Module, inward: Any, outward: Any) -> None:
            gradients[name] += 1

        return hook

    for name, layer in leaves(network).items():
        layer.register_forward_hook(forward(name))
        layer.register_full_backward_hook(backward(name))
    x = images(network).requires_grad_()
    network(x).square().sum().backward()
    assert calls == gradients == Counter(dict.fromkeys(leaves(network), 1))
    assert [name for name, output, version in outputs if output._version != version] == []
    assert not [name for name, parameter in network.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("make", [partial(GoogLeNet, aux_logits=True), partial(InceptionV3, aux_logits=True)], ids=named)
def test_auxiliary_heads_are_hooked_without_harm(make: Any) -> None:
    network = alive(make).train()
    gradients: set[str] = set()
    for name, layer in leaves(network).items():
        layer.register_full_backward_hook(lambda layer, inward, outward, name=name: gradients.add(name))
    size = getattr(network, "aux_min_size", 32)
    sum(output.sum() for output in network(images(network, size=size).requires_grad_())).backward()
    assert gradients == set(leaves(network))


@every_arithmetic
def test_networks_are_pickled_and_copied(make: Any) -> None:
    network = on_meta(make)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert type(other) is type(network)
        assert repr(other) == repr(network)
        assert other(images(other).to("meta")).shape == (2, network.num_classes)


@every_compiled
def test_torch_export_keeps_the_batch_dynamic(make: Any) -> None:
    network = alive(make).eval()
    program = torch.export.export(network, (images(network),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (1, 5):
        x = images(network, batch)
        torch.testing.assert_close(program.module()(x), network(x))


@every_traced
def test_jit_trace_computes_the_same_at_any_size(make: Any) -> None:
    network = alive(make).eval()
    x = images(network)
    traced = torch.jit.trace(network, x, check_trace=False)
    with torch.inference_mode():
        for other in (x, images(network, batch=1, size=x.shape[-1] + 1), images(network, batch=3, size=x.shape[-1] + 34)):
            torch.testing.assert_close(traced(other), network(other))


@every_compiled
def test_torch_compile_needs_no_graph_break(make: Any) -> None:
    network = alive(make).eval()
    x = images(network)
    torch.compiler.reset()
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(network, backend="aot_eager", fullgraph=True)(x), network(x))


@pytest.mark.long
def test_inductor_computes_the_same() -> None:
    network = alive(SqueezeNet1_1).eval()
    x = images(network)
    torch.compiler.reset()
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(network, fullgraph=True)(x), network(x), rtol=1e-3, atol=1e-3)


def test_the_guard_speaks_before_a_compiled_network_computes() -> None:
    torch.compiler.reset()
    network = torch.compile(alive(MobileNetV1_025).eval(), backend="aot_eager")
    with pytest.raises(ValueError, match="takes 3 channels"):
        network(torch.randn(1, 4, 32, 32))
