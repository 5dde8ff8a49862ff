from __future__ import annotations

import argparse
import pickle
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._utils import _rebuild_tensor_v2

from convert import formats
from convert.formats import pytorch, safetensors
from convert.formats._picklearrays import Call, Name
from convert.formats._torch import as_tensor
from convert.formats._torchpickle import opened
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat
from zoo.pretrained.records import to_safetensors

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2, dtype=torch.float16)}


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


class Rebuilt:
    """A tensor that claims another shape, strides and offset than its storage has."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.size, self.stride, self.offset = size, stride, offset

    def __reduce__(self) -> tuple[Any, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.save itself wants the typed storage that torch warns of
            storage = torch.ones(4).storage()
        return _rebuild_tensor_v2, (storage, self.offset, self.size, self.stride, False, OrderedDict())


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def save(content: Any) -> Path:
        torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=request.param)
        return tmp_path / "x.pth"

    return save


def read(path: Path) -> dict[str, Tensor]:
    return {name: as_tensor(np.array(stored.array())) for name, stored in pytorch.read(path).tensors.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in expected.items())


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        {"state_dict": STATE, "epoch": 3},
        {"model": STATE, "optimizer": {"state": {}}},
        {"model": {"state_dict": STATE}},
        {"model_state_dict": STATE, "model_ema": {"a.weight": torch.zeros(1)}},
        {"model_ema": STATE, "epoch": 1},
        {"state_dict": {f"module.{name}": tensor for name, tensor in STATE.items()}},
        {f"module._orig_mod.{name}": tensor for name, tensor in STATE.items()},
        {name: nn.Parameter(tensor) for name, tensor in STATE.items()},
        {**STATE, "epoch": 3, "note": "x", 5: torch.zeros(1)},
        {"state_dict": STATE, "best": np.float64(0.5), "classes": np.arange(3), "args": argparse.Namespace(lr=0.1)},
    ],
    ids=["plain", "state_dict", "model", "nested", "plain before ema", "ema", "module", "compiled", "parameters", "dropped", "numpy"],
)
def test_the_state_dict_is_found(save: Any, content: Any) -> None:
    assert same(read(save(content)), STATE)


def test_a_prefix_that_only_some_names_have_is_kept(save: Any) -> None:
    mixed = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    assert same(read(save(mixed)), mixed)


def test_tied_and_sliced_tensors_are_each_written_whole(save: Any, tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": base, "tied": base, "slice": base[1], "turned": base.T}
    assert same(read(save(tensors)), tensors)
    safetensors.save_stored(pytorch.read(save(tensors)).tensors, tmp_path / "x.safetensors")
    assert same(safetensors.tensors((tmp_path / "x.safetensors").read_bytes()), tensors)


def test_code_is_named_and_not_run(save: Any, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    for content in (Code(target), {"state_dict": STATE, "hook": Code(target)}):
        with pytest.raises(UnsafeFormat, match=r"Path\.touch|PosixPath|getattr"):
            read(save(content))
    assert not target.exists()


class Whole(nn.Module):
    """A module that somebody saves whole: with parameters of its own, modules in modules, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.inner = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
        self.register_buffer("shift", torch.rand(2))
        self.register_buffer("fleeting", torch.rand(2), persistent=False)


def test_of_a_module_saved_whole_the_tensors_are_read_and_no_code(save: Any) -> None:
    module = Whole()
    for content in (module, {"model": module, "epoch": 3}, nn.DataParallel(module)):
        found = read(save(content))
        assert found.keys() == module.state_dict().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())


def test_a_class_is_admitted_in_a_module_alone_and_a_call_nowhere(save: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsafeFormat, match="Whole"):
        read(save({"state_dict": STATE, "kind": Whole}))
    with pytest.raises(UnsafeFormat, match="Whole"):
        read(save([Whole()]))
    target, module = tmp_path / "ran", Whole()
    module.hook = Code(target)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnsafeFormat, match=r"Path\.touch|PosixPath|getattr"):
        read(save(module))
    assert not target.exists()


def test_os_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UnsafeFormat, match="posix"):
        read(tmp_path / "x.pth")


def test_numpy_names_lead_to_nothing_of_numpy(tmp_path: Path) -> None:
    """A record takes any argument: what a hostile dtype or scalar would do inside NumPy does not happen."""
    torch.save({**STATE, "x": np.arange(2, dtype=np.int8)}, tmp_path / "x.pth")
    loaded = opened(memoryview((tmp_path / "x.pth").read_bytes()), tmp_path / "x.pth").content
    assert isinstance(loaded["x"], Call)
    assert isinstance(loaded["x"].what, Name)


def test_every_file_reads_as_torch_reads_it(save: Any) -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    state = {str(kind): torch.arange(24).reshape(2, 3, 4).to(kind) for kind in kinds}
    base = torch.arange(60.0).reshape(3, 4, 5)
    state |= {
        "turned": base.permute(2, 0, 1),
        "part": base[1:, ::2],
        "wide": base[:, :1].expand(3, 4, 5)[:, :1],
        "scalar": torch.tensor(3.0),
    }
    state |= {"none": torch.zeros(0, 3), "cast": torch.arange(4).to(torch.uint16), "eighth": torch.ones(5).to(torch.float8_e4m3fn)}
    path = save(OrderedDict(state))
    found = read(path)
    assert found.keys() == state.keys()
    for name, wanted in state.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        ours, theirs = (bytes(t.contiguous().reshape(-1).view(torch.uint8).numpy()) for t in (found[name], wanted))
        assert ours == theirs


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (Rebuilt((2**40,), (0,)), LimitExceeded),
        (Rebuilt((2**20, 2**20), (0, 0)), LimitExceeded),
        (Rebuilt((5,), (1,)), MalformedFile),
        (Rebuilt((2,), (100,)), MalformedFile),
        (Rebuilt((2,), (-3,)), MalformedFile),
        (Rebuilt((2,), (1,), offset=3), MalformedFile),
        (Rebuilt((2,), (1,), offset=-1), MalformedFile),
    ],
    ids=["stride 0", "stride 0 twice", "too long", "far", "backwards", "offset", "before"],
)
def test_a_tensor_larger_than_its_bytes_is_refused(save: Any, lie: Rebuilt, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(save({"x": lie}))


def test_many_views_of_one_storage_are_refused(save: Any) -> None:
    big = torch.zeros(2**20)
    with pytest.raises(LimitExceeded, match="would unfold"):
        read(save({str(i): big for i in range(10)}))


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_tensors_that_are_no_plain_arrays_are_refused(save: Any, tensor: Tensor) -> None:
    with pytest.raises(UnsupportedFormat, match="not a dense tensor"):
        read(save({"x": tensor}))


@pytest.mark.parametrize("content", [{}, [1, 2], {"epoch": 3}, torch.zeros(3)], ids=["empty", "list", "no tensor", "bare tensor"])
def test_a_file_without_named_tensors_is_refused(save: Any, content: Any) -> None:
    with pytest.raises(MalformedFile):
        read(save(content))


def scripted(path: Path, module: nn.Module, *, traced: bool = False) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is being retired, and says so
        made = torch.jit.trace(module, torch.ones(1, 3, 8, 8)) if traced else torch.jit.script(module)
        torch.jit.save(made, str(path))
    return path


@pytest.mark.parametrize("traced", [False, True])
def test_the_tensors_of_a_torchscript_program_are_those_of_its_state_dict(traced: bool, tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    module = nn.Sequential(inner, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    source = formats.read(scripted(tmp_path / "x.ts", module, traced=traced))
    expected = module.state_dict()
    assert source.tensors.keys() == expected.keys()
    assert all((stored.array() == expected[name].numpy()).all() for name, stored in source.tensors.items())
    assert (source.format, source.framework) == ("pytorch", "TorchScript")
    assert source.notes == ["the code of the program was neither read nor run"]


def test_a_program_without_names_of_its_tensors_says_what_to_do(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval())).save(str(tmp_path / "x.pt"))
    with pytest.raises(MalformedFile, match=r"hold no tensors: frozen, .* before torch\.jit\.freeze"):
        formats.read(tmp_path / "x.pt")


@pytest.mark.real
def test_a_real_torchscript_program_is_read_under_its_own_ending(real: Path) -> None:
    path = real / "real" / "torchscript" / "final_mnist_cnn.ts"
    source = formats.read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.jit.load(str(path)).state_dict()
    assert source.facts["program"] == "CNNModel"
    assert source.tensors.keys() == expected.keys()
    assert all((stored.array() == expected[name].numpy()).all() for name, stored in source.tensors.items())


def test_an_ancient_tar_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(UnsupportedFormat, match="save it again"):
        read(tmp_path / "x.tar")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(10**6)}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as bomb:
        for info in plain.infolist():
            bomb.writestr(info.filename, plain.read(info))
    with pytest.raises(LimitExceeded, match="unpack"):
        read(tmp_path / "bomb")


def test_truncation_anywhere_is_an_error_of_ours(save: Any, tmp_path: Path) -> None:
    data = save(STATE).read_bytes()
    for length in range(0, len(data) - 1, max(1, len(data) // 97)):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises((MalformedFile, UnsafeFormat)):  # half a name is a name that nobody allows
            read(tmp_path / "cut")


def test_noise_is_an_error_of_ours(tmp_path: Path) -> None:
    for noise in (b"", b"\0" * 100, b"<html>login</html>", pickle.dumps({"a": 1}), b"PK\3\4" + b"\0" * 50):
        (tmp_path / "x").write_bytes(noise)
        with pytest.raises((MalformedFile, UnsafeFormat)):
            read(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello, world, this is no file of weights\n", r"x\.pth is no PyTorch file: it starts with b'hello, world, th'…$"),
        (b"", r"x\.pth is no PyTorch file: it is empty$"),
        (b"\x80\x02" + b"e" * 9, r"x\.pth is no readable PyTorch file: its pickle is damaged\. Is it cut short"),
        (b"\x80\x02", r"x\.pth is no readable PyTorch file: its pickle is damaged\. Is it cut short"),
        (b"\x80" + bytes(range(99, 120)), r"x\.pth is no readable PyTorch file: its pickle is damaged\. Is it cut short"),
    ],
)
def test_a_file_of_another_kind_is_explained_without_torchs_internals(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(MalformedFile, match=message):
        read(tmp_path / "x.pth")


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.pth")


@pytest.mark.real
def test_real_files_read_and_go_through_safetensors_bit_for_bit(real: Path, tmp_path: Path) -> None:
    folder = real / "real"
    files = [
        *folder.glob("pytorch/*.th"), *folder.glob("pytorch/*.tar"), *folder.glob("pytorch/*.pth"),
        *folder.glob("mtcnn/pytorch/*.pt"), *folder.glob("ultralight/models/pretrained/*.pth"),
    ]  # fmt: skip
    assert len(files) >= 9
    for path in files:
        tensors = read(path)
        assert not any(name.startswith("module.") for name in tensors)
        to_safetensors(path, tmp_path / "x.safetensors")
        assert same(safetensors.tensors(bytearray((tmp_path / "x.safetensors").read_bytes())), tensors)
