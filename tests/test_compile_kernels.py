"""Kernels are compiled for a GPU that isn't there, and one that can't be is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLANTED = """
import sys
import triton
from triton import language as tl
from zoo.kernels.ops import cross_entropy as op

@triton.jit
def _bad(images, to, BLOCK: tl.constexpr):
    tl.store(to, images.to(tl.float32))

right = op.launch
def launch(logits, **given):
    _bad[(1,)](logits.shape[0], logits, BLOCK=1)
    return right(logits=logits, **given)
op.launch = launch

from tests.compile_kernels import main
sys.exit(main(["--ops", "cross_entropy"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env={**known, "PYTHONPATH": str(ROOT)})


def test_all_cases_of_an_op_are_compiled() -> None:
    done = run("tests/compile_kernels.py", "--ops", "cross_entropy")
    assert done.returncode == 0, done.stderr
    assert re.match(r"[1-9]\d* cases of 1 ops compiled for sm_90 in \d+ s, 0 refused", done.stdout)


def test_what_the_interpreter_takes_and_the_compiler_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    done = run(str(tmp_path / "planted.py"))
    assert done.returncode == 1
    assert "cross_entropy, one image, many classes, bfloat16: CompilationError: AttributeError" in done.stderr
    assert "2 refused" in done.stdout  # both that have one image, of which the number is a constant
