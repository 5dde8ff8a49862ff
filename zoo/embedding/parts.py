"""The folder of a job that is under way: its manifest, and finished parts, each a file that is there whole or not at all."""

from __future__ import annotations

import json
import mmap
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from convert.formats import safetensors
from weights.documents import json_file, misread, read_json, table
from weights.errors import ConvertError
from weights.whole import room, whole, write_whole
from zoo.embedding.plan import Plan

MANIFEST, LOCK = "manifest.json", "lock"


@dataclass(slots=True)
class Part:
    """What was computed of a range of images.

    Attributes:
        digests: BLAKE3 of each image's bytes, uint8 (n, 32); zeros where they could not be read.
        readable: bool (n,).
        vectors: {tap: float32 (n, D)}; zeros where the image could not be used.
        problems: {index in the source: why the image could not be used}.
    """

    digests: Tensor
    readable: Tensor
    vectors: dict[str, Tensor]
    problems: dict[int, str]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all, and onto the disk."""
        tensors = {"digests": self.digests, "readable": self.readable}
        tensors |= {f"vectors {tap}": value for tap, value in self.vectors.items()}
        with whole(path, sync=True) as unfinished:
            safetensors.save(tensors, unfinished, {"problems": json.dumps(self.problems)})

    @classmethod
    def load(cls, path: Path) -> Part:
        """Map a file that `save` wrote.

        Raises:
            MalformedFile: it is damaged.
        """
        todo = "Delete it and call again: it is computed anew"
        with misread(f"'{path}' is no finished part", todo, wraps=ConvertError):
            with path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            tensors = safetensors.tensors(buffer)
            problems = table(read_json(safetensors.metadata(buffer)["problems"], f"'{path}'", todo))
            vectors = {name.removeprefix("vectors "): value for name, value in tensors.items() if name.startswith("vectors ")}
            digests, readable, rows = tensors["digests"], tensors["readable"], len(tensors["digests"])
            if digests.shape != (rows, 32) or readable.shape != (rows,) or any(len(value) != rows for value in vectors.values()):
                raise ValueError("its tensors are not of one length")
            return cls(digests, readable, vectors, {int(index): str(why) for index, why in problems.items()})


class Workplace:
    """The folder beside the output that holds what is finished, locked while a process works in it.

    Args:
        out: the output's path; the folder is called like it, with ".parts" behind.
        plan: the job.
        restart: whether to throw away what another run has finished.

    Raises:
        FileExistsError: the output is there already, finished, and no restart was asked for.
        ValueError: the folder belongs to another job, or another process is at work in it; the message says what differs.
    """

    def __init__(self, out: Path, plan: Plan, restart: bool) -> None:
        self.folder = out.with_name(f"{out.name}.parts")
        shutil.rmtree(self._gone, ignore_errors=True)  # of a process that was killed while it tidied up
        if out.exists() and not self.folder.exists() and not restart:
            raise FileExistsError(f"'{out}' is there already; restart=True computes it anew, or name another file")
        with room(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / LOCK)
        try:
            with room(out):
                self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another process is at work on {out}; wait for it, or name another file") from None
        try:
            self._clear(".*", "*" if restart else ".*")
            self.probe = self._begin(plan)
        except BaseException:
            self._lock.release()
            raise

    @property
    def _gone(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.gone")

    def _begin(self, plan: Plan) -> str | None:
        """Compare the manifest with the plan, or write it; return what its first run's probe gave."""
        self._manifest = self.folder / MANIFEST
        facts = plan.facts()
        if not self._manifest.exists():
            self._clear("part-*")  # nobody knows what made them
            write_whole(self._manifest, json.dumps(facts, indent=1), sync=True)
            return None
        found = self._told()
        probe = found.pop("probe", None)
        differ = [name for name in facts if name != "place" and facts[name] != found.get(name)]
        kept = sum(1 for _ in self.folder.glob("part-*"))
        if differ and not kept:  # nothing was finished, so nothing is thrown away
            write_whole(self._manifest, json.dumps(facts, indent=1), sync=True)
            return None
        if differ:
            lines = [f"\n  {name}: {_shown(found.get(name))} then, {_shown(facts[name])} now" for name in differ]
            raise ValueError(
                f"{self.folder} holds {kept} finished parts of another job:{''.join(lines)}\n"
                "Ask for the same again to go on with it, name another output, or throw it away: restart=True"
            )
        return probe

    def keep_probe(self, probe: str) -> None:
        """Write down what the first run's network gives for the probe."""
        write_whole(self._manifest, json.dumps({**self._told(), "probe": probe}, indent=1), sync=True)
        self.probe = probe

    def _told(self) -> dict[str, Any]:
        todo = "restart=True begins anew"
        with misread(f"'{self._manifest}' is damaged", todo):
            found = table(json_file(self._manifest, todo))
            if not isinstance(found.get("probe"), str | None):
                raise TypeError("its probe is no text")
            return found

    def path(self, part: range) -> Path:
        """Return where a part's file is, or will be."""
        return self.folder / f"part-{part.start:012d}.safetensors"

    def unfinished(self, plan: Plan) -> list[range]:
        """List the parts that are still to do."""
        return [part for part in plan.parts() if not self.path(part).exists()]

    def become(self, out: Path) -> None:
        """Make the folder itself the output: whole, and in place of an earlier one."""
        gone = self._gone
        shutil.rmtree(gone, ignore_errors=True)
        if out.exists():
            out.replace(gone)
        self._lock.release()
        self.folder.replace(out)  # with its manifest: parts without one are nobody's
        for name in (MANIFEST, LOCK):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)

    def _clear(self, *patterns: str) -> None:
        """Take away what a killed run left unfinished, or everything, the manifest last: it says what made the parts."""
        found = {path for pattern in patterns for path in self.folder.glob(pattern) if path.name != LOCK}
        for path in sorted(found, key=lambda path: path.name == MANIFEST):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process work here."""
        self._lock.release()

    def remove(self) -> None:
        """Take the folder away; at no moment does it look like a job with parts missing."""
        gone = self._gone
        shutil.rmtree(gone, ignore_errors=True)
        self.folder.replace(gone)
        self._lock.release()
        shutil.rmtree(gone, ignore_errors=True)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
