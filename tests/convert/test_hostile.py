"""Damaged files are refused or read, never more: 50 mutations a format, 2,000 by ``-m long``, and 20,000 by ``make faults-files``."""

from __future__ import annotations

import random
from pathlib import Path

import faults_files
import hostile
import pytest
from hostile import mutate, run
from structured import fields, of_fields, of_json, structured, written

from convert.formats import formats, read
from convert.source import in_memory


@pytest.mark.parametrize("format", sorted(formats()))
@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.long)])
def test_mutated_files_are_refused_or_read(format: str, count: int) -> None:
    outcomes, faults = run(format, count)
    assert faults == []
    assert sum(outcomes.values()) == count
    assert sum(outcomes.values()) > outcomes.get("read", 0), "the mutations did no harm, so they prove nothing"


@pytest.mark.parametrize("format", faults_files.STRUCTURED)
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_files_whose_values_are_changed_are_refused_or_read(format: str, count: int) -> None:
    outcomes, faults = run(format, count, structure=True)
    assert faults == []
    assert sum(outcomes.values()) == count
    assert outcomes["read"] > count / 10, "the containers are broken, so what they say was not reached"
    assert outcomes["read"] < count


@pytest.mark.parametrize("format", sorted(formats()))
def test_a_damaged_file_has_all_its_companions_beside_it(format: str, tmp_path: Path) -> None:
    """Without its shards any file is refused, whatever was damaged."""
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    for original in hostile.seeds(format, tmp_path / "good"):
        unhurt = hostile.mutations([original], 1, tmp_path / "bad", 0, change=lambda data, _: data)
        assert [hostile.read_everything(copy, format) for copy in unhurt] == ["read"], original.name


@pytest.mark.parametrize(
    ("harm", "seen"),
    [
        ("open('/etc/hostname').read()", "opened /etc/hostname"),
        ("open(path, 'ab').close()", "opened"),
        ("os.system('true')", "os.system"),
        ("__import__('socket').socket()", "socket"),
        ("os.kill(os.getpid(), 11)", "died with -11"),
        ("1 / 0", "ZeroDivisionError"),
        ("b'x' * 2**29", "MB of memory"),
    ],
)
def test_each_kind_of_harm_is_seen(harm: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign's own proof: a reader that does harm with one file in ten is found out."""
    code = (tmp_path / "hostile.py").write_text
    text = Path(hostile.__file__).read_text()
    wrong = "def read_everything(path, format):\n    Path.turn = getattr(Path, 'turn', 0) + 1\n"
    wrong += f"    if Path.turn % 10 == 0:\n        {harm}\n    return 'read'\n\n\n"
    code(
        text.replace("def _compare(", f"{wrong}def _compare(")
        .replace("HERE = Path(__file__).parent", f"HERE = Path({str(hostile.HERE)!r})")
        .replace('HERE.parents[1] / ".faults"', f"Path({str(tmp_path)!r})")
    )
    monkeypatch.setattr(hostile, "__file__", str(tmp_path / "hostile.py"))
    _, faults = run("darknet", 11)
    assert seen in " ".join(faults)


def test_an_accepted_file_with_other_numbers_is_seen(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "x.npz", a=np.arange(4.0))
    with read(tmp_path / "x.npz") as source:
        source.tensors["a"] = in_memory("a", np.arange(4.0)[::-1].copy())
        with pytest.raises(ValueError, match="other numbers"):
            hostile._compare(source, tmp_path / "x.npz", "npz")


def test_an_interrupted_campaign_goes_on_and_its_report_leaves_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def little(format: str, count: int, seed: int, *, structure: bool = False) -> tuple[dict[str, int], list[str]]:
        asked.append(seed)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"read": 400, "MalformedFile": 600}, ["a fault"] if seed == 0 else []

    monkeypatch.setattr(faults_files, "run", little)
    monkeypatch.setattr(faults_files, "STATE", tmp_path / "state.json")
    monkeypatch.setattr("sys.argv", ["faults_files", "--format", "npz", "--count", "4000", "--report", str(tmp_path / "faults.md")])
    (tmp_path / "faults.md").write_text("# Faults\n\n## Network\n\nno fault\n")
    assert faults_files.main() == 130
    assert faults_files.main() == 1
    assert asked == [0, 1, 2, 2, 3]
    report = (tmp_path / "faults.md").read_text()
    assert "| npz | 4,000 | 0-3 | 1,600 | 2,400 | MalformedFile 2,400 | 1 |" in report
    assert report.startswith("# Faults\n\n## Network\n\nno fault\n")
    assert report.count("## Files") == 1


def test_mutations_are_the_same_each_time_and_damage_most_files() -> None:
    data = bytes(range(256)) * 8
    made = [mutate(data, random.Random(seed)) for seed in range(100)]
    assert made == [mutate(data, random.Random(seed)) for seed in range(100)]
    assert sum(each != data for each in made) > 80


def test_a_changed_value_leaves_its_container_whole() -> None:
    import io
    import json
    import zipfile

    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("a/version", "3")
        archive.writestr("a.json", '{"shape": [1, 2], "name": "x"}')
    message = b"\x0a\x03abc\x12\x06\x0a\x02hi\x10\x05\x18\x07"
    for seed in range(200):
        with zipfile.ZipFile(io.BytesIO(structured(held.getvalue(), random.Random(seed)))) as archive:
            assert archive.testzip() is None
        json.loads(of_json(b'[{"sizes": [3, 4.5, "SAME", null, true]}]', random.Random(seed)))
    once = [written(of_fields(fields(message) or [], random.Random(seed))) for seed in range(200)]
    assert sum(fields(each) is not None for each in once) > 190
    assert len(set(once)) > 15


def test_torch7s_objects_are_taken_apart_and_written_as_they_were(tmp_path: Path) -> None:
    from structured_torch import torch7

    for path in hostile.seeds("torch7", tmp_path):
        assert torch7(path.read_bytes()) == path.read_bytes()


def test_a_changed_program_is_still_an_archive_whose_pickle_ends(tmp_path: Path) -> None:
    import io
    import pickletools
    import zipfile

    data = hostile.seeds("torchscript", tmp_path)[2].read_bytes()
    made: set[bytes] = set()
    for seed in range(100):
        with zipfile.ZipFile(io.BytesIO(structured(data, random.Random(seed)))) as archive:
            assert archive.testzip() is None
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        made.update(pickles)
        assert all(list(pickletools.genops(one))[-1][0].name == "STOP" for one in pickles)
    assert len(made) > 40
