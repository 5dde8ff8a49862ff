"""Julia's arrays and tensors share their memory, and files for Flux are what BSON.jl and JLD2.jl would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson as pymongo
import h5py
import numpy as np
import pytest
import torch as pytorch

from convert.formats import safetensors
from zoo import ResNet20, plain
from zoo.conversion.convert import convert
from zoo.julia import collect, tensor, torch


def whcn(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Number an array's elements as Julia's reshape(1:n, shape) does: the first axis runs fastest."""
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape, order="F")


def test_images_change_the_order_of_their_axes_and_not_their_memory() -> None:
    array = whcn(5, 4, 3, 2)
    made = tensor(array)
    assert made.shape == (2, 3, 4, 5)
    assert made.is_contiguous()
    assert made[1, 2, 3, 4] == array[4, 3, 2, 1]
    assert made.flatten().tolist() == list(range(120))
    made[0, 0, 0, 1] = -1
    assert array[1, 0, 0, 0] == -1
    back = collect(made)
    assert back.shape == (5, 4, 3, 2)
    assert back.flags.f_contiguous
    assert np.shares_memory(back, array)


@pytest.mark.parametrize("shape", [(7,), (3, 2), (4, 3, 2), (5, 4, 3, 2), (6, 5, 4, 3, 2), ()])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_, np.complex64])
def test_every_shape_and_type_comes_back(shape: tuple[int, ...], dtype: Any) -> None:
    array = np.asfortranarray(whcn(*shape, dtype=dtype))
    back = collect(tensor(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_what_can_not_be_shared_is_copied() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)  # C's order
    fixed = whcn(3, 4)
    fixed.flags.writeable = False
    for array in (rows, fixed, whcn(3, 4)[::-1], whcn(3, 4).astype(">f4")):
        made = tensor(array)
        assert np.array_equal(collect(made), array)
        assert made.is_contiguous()
        assert not np.shares_memory(collect(made), array)
    turned = pytorch.arange(6.0).reshape(2, 3).T
    assert np.array_equal(collect(turned), turned.numpy().T)


class JuliaArray:
    """Gives its memory as juliacall's ArrayValue does: by NumPy's protocol, strides as Julia has them."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


def test_an_array_that_speaks_numpys_protocol_is_shared() -> None:
    array = whcn(3, 2, 2, 1)
    assert np.shares_memory(collect(tensor(JuliaArray(array))), array)


@pytest.mark.parametrize(
    ("given", "dev", "error", "message"),
    [
        (whcn(2, 2), -2, ValueError, "-1 for the CPU"),
        (whcn(2, 2), True, ValueError, "-1 for the CPU"),
        (whcn(2, 2), 99, ValueError, "there is no GPU 99"),
        (np.array(["a"]), -1, TypeError, "an array of numbers"),
        (np.zeros(2, np.longdouble), -1, TypeError, "convert the array to Float32"),
        (pytorch.zeros(2), -1, TypeError, "a tensor already"),
    ],
)
def test_what_is_no_array_of_julias_is_refused(given: Any, dev: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tensor(given, dev)


def test_collect_refuses_what_julia_has_not() -> None:
    with pytest.raises(TypeError, match=r"collect\(t\.float\(\)\)"):
        collect(pytorch.zeros(2, dtype=pytorch.bfloat16))
    with pytest.raises(TypeError, match="takes a tensor"):
        collect(np.zeros(2))  # pyright: ignore[reportArgumentType]


def test_torch_is_fast() -> None:
    network = ResNet20().eval()
    quick = torch(network)
    assert plain(quick) is network
    x = whcn(32, 32, 3, 1) / 3072
    with pytorch.no_grad():
        assert np.abs(collect(quick(tensor(x))) - collect(network(tensor(x)))).max() < 1e-4


@pytest.fixture
def network(tmp_path: Path) -> ResNet20:
    made = ResNet20().eval()
    safetensors.save(made.state_dict(), tmp_path / "a.safetensors")
    return made


def juliad(value: Any) -> Any:
    """Raise what BSON.jl lowered, by its own rules (formats.md, 1.1): tagged arrays are column-major, everything else is itself."""
    if isinstance(value, dict) and value.get("tag") == "array":
        kind = {"Float32": "<f4", "Int64": "<i8"}[value["type"]["name"][-1]]
        return np.frombuffer(value["data"], kind).reshape([int(n) for n in value["size"]], order="F")
    if isinstance(value, dict):
        return {key: juliad(one) for key, one in value.items()}
    return [juliad(one) for one in value] if isinstance(value, list) else value


def arrays_in(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [array for one in inner for array in arrays_in(one)]


def as_flux_keeps(network: ResNet20) -> list[np.ndarray]:
    """List what Flux's layers hold of a network: Conv's kernels turned round and (W, H, I, O), dense weights (O, I)."""
    found = []
    for name, value in network.state_dict().items():
        array = value.numpy()
        if name.endswith("num_batches_tracked"):
            continue
        found.append(array[:, :, ::-1, ::-1].T if array.ndim == 4 else array)
    return found


@pytest.mark.parametrize("ending", ["bson", "jld2"])
def test_a_file_for_flux_is_what_julias_libraries_read_by_their_rules(ending: str, network: ResNet20, tmp_path: Path) -> None:
    """There is no Julia here: PyMongo and libhdf5 open the files, and the rules of BSON.jl and JLD2.jl make arrays of what they find."""
    convert(tmp_path / "a.safetensors", tmp_path / f"b.{ending}", ResNet20, to_convention="convolution", prove=False)
    if ending == "bson":
        found = arrays_in(juliad(pymongo.decode((tmp_path / "b.bson").read_bytes())["model_state"]))
    else:
        found = []
        with h5py.File(tmp_path / "b.jld2") as file:
            state: Any = file["model_state"]
            state.visititems(lambda _, item: found.append(item[()].T) if isinstance(item, h5py.Dataset) and item.ndim else None)
    wanted = as_flux_keeps(network)
    assert len(found) == len(wanted)
    left = list(found)
    for array in wanted:
        place = next((i for i, one in enumerate(left) if one.shape == array.shape and np.array_equal(one, array)), None)
        assert place is not None
        left.pop(place)


def test_collect_takes_what_pytorch_only_views_and_refuses_what_has_holes() -> None:
    turned = pytorch.tensor([[1 + 2j, 3 - 1j]]).conj()
    assert (collect(turned) == np.array([[1 - 2j], [3 + 1j]])).all()
    assert (collect(turned.imag) == np.array([[-2.0], [1.0]])).all()
    with pytest.raises(TypeError, match=r"collect\(t\.to_dense\(\)\)"):
        collect(pytorch.zeros(2, 3).to_sparse())
