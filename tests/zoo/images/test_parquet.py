import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from zoo.images import open_source


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def hugging_face(path: Path, seeds: list[int], labels: list[int | None]) -> None:
    """Write a file as the datasets library does: a struct of bytes and path, and the classes' names in the metadata."""
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = [{"image": {"bytes": png(seed), "path": f"{seed}.png"}, "label": label} for seed, label in zip(seeds, labels, strict=True)]
    parquet.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=2)


def test_rows_follow_each_other_over_row_groups_and_files_and_classes_have_their_names(tmp_path: Path) -> None:
    hugging_face(tmp_path / "train-00000.parquet", [0, 1, 2, 3, 4], [0, 1, None, 1, 0])
    hugging_face(tmp_path / "train-00001.parquet", [5], [7])
    for where in (tmp_path, tmp_path / "train-*.parquet", tmp_path.as_uri()):
        source = open_source(str(where))
        assert [item.key for item in source] == [*(f"train-00000.parquet#{i}" for i in range(5)), "train-00001.parquet#0"]
        assert [item.label for item in source] == ["cat", "dog", None, "dog", "cat", "7"]
        assert source.classes == ["7", "cat", "dog"]
        assert [source.read(i) for i in (5, 0, 3, 4, 1, 2)] == [png(i) for i in (5, 0, 3, 4, 1, 2)]
    again = pickle.loads(pickle.dumps(source))
    assert again.read(3) == png(3)
    assert again.fingerprint == source.fingerprint


def test_plain_bytes_and_other_names_are_found(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"jpg": [png(0)], "cls": ["cat"], "other": ["x"]}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert (source[0].label, source.read(0)) == ("cat", png(0))
    parquet.write_table(pa.table({"blob": pa.array([png(1), None], pa.large_binary())}), tmp_path / "b.parquet")
    source = open_source(tmp_path / "b.parquet")
    assert (source[0].label, source.read(0)) == (None, png(1))
    with pytest.raises(FileNotFoundError, match=r"b.parquet#1 holds no bytes"):
        source.read(1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"a": [b"x"], "b": [b"y"]}, "which of a, b holds images is not clear"), ({"text": ["x"]}, "none of text holds bytes")],
)
def test_a_table_without_a_column_of_images_says_what_it_has(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "a.parquet")


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"a.parquet can't be read as Parquet"):
        open_source(tmp_path / "a.parquet")


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pa.table({"jpg": [png(0)]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow, which is not installed: pip install 'kernelzoo\[embed\]'"):
        open_source(tmp_path / "a.parquet")
