"""What readers say comes through JSON as it was: value, type and bits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from convert._manifest import packed, unpacked


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 2**70, 1.5, float("inf"), "x", b"\0", (1, (2, [3.0])), [], {}, {"a": (1, 2), 3: [None]}, np.float32(0.1), np.int64(3)],
    ids=repr,
)
def test_values_come_back_as_they_went(value: Any) -> None:
    back = unpacked(json.loads(json.dumps(packed(value))))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_arrays_come_back_as_they_went() -> None:
    for array in (np.arange(6, dtype=">f4").reshape(2, 3), np.zeros((0, 2)), np.array(1.5)):
        back = unpacked(json.loads(json.dumps(packed(array))))
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
