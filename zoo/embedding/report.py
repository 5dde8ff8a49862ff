"""What a finished job says: what it wrote, what it left out, and what limited its speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Skipped:
    """An image that has no row.

    Attributes:
        key: of the image.
        index: in the source; None for what looks like an image and was left out when the source was opened.
        why: it could not be used; "" for a copy.
        copy_of: the key of the first image with the same bytes; None where it could not be used.
    """

    key: str
    index: int | None
    why: str
    copy_of: str | None = None


@dataclass(slots=True)
class Report:
    """The end of a job.

    Attributes:
        path: of the output.
        rows: that it has.
        widths: numbers in a vector, by tap.
        computed: images of this run; `resumed` were done by earlier ones.
        resumed: images.
        unreadable: images that could not be used, those that `Source.left_out` names among them.
        copies: images that `dedupe` left out.
        others: how many files beside the images are none, by their endings.
        listed: the file that lists both, None where there are none.
        kind: of the images, "JPEG"; "image" where there are several kinds, or their names don't tell.
        seconds: of the whole run, with starting processes and writing.
        preparing_s: of these, seconds until the first image was begun: opening the source, preparing the network, starting processes.
        images_s: images per second while batches flowed.
        decoder_images_s: what decoding reached on its own while it was not waiting, all processes together.
        model_images_s: what the network reached while it had a batch.
        workers: processes that decoded.
        certificate: with int8, how near its vectors are to float32's; empty where an earlier run computed all.
    """

    path: Path
    rows: int = 0
    widths: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    resumed: int = 0
    unreadable: list[Skipped] = field(default_factory=list)
    copies: list[Skipped] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    listed: Path | None = None
    kind: str = "image"
    seconds: float = 0.0
    preparing_s: float = 0.0
    images_s: float = 0.0
    decoder_images_s: float = 0.0
    model_images_s: float = 0.0
    workers: int = 0
    certificate: list[str] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """How many images there are, with those that have no row."""
        return self.rows + len(self.unreadable) + len(self.copies)

    @property
    def limited_by(self) -> str:
        """Name what limits the speed, "JPEG decoding" or "the network"; "" where nothing was computed."""
        if not (self.images_s and self.decoder_images_s and self.model_images_s):
            return ""
        return f"{self.kind} decoding" if self.images_s / self.decoder_images_s >= self.images_s / self.model_images_s else "the network"

    @property
    def limit(self) -> str:
        """Say which of the two limits, and how much of its own rate the job reached; "" where nothing was computed."""
        if not (self.images_s and self.decoder_images_s and self.model_images_s):
            return ""
        decoder, model = self.images_s / self.decoder_images_s, self.images_s / self.model_images_s
        if decoder >= model:
            return f"decoding limits: {decoder:.2f} of the decoder's rate, {model:.2f} of the network's"
        return f"the network limits: {model:.2f} of its rate, {decoder:.2f} of the decoder's"

    def facts(self) -> dict[str, Any]:
        """Return what machines read."""
        return {
            **asdict(self),
            "path": str(self.path),
            "unreadable": [{"key": e.key, "index": e.index, "why": e.why} for e in self.unreadable],
            "copies": [{"key": e.key, "index": e.index, "copy_of": e.copy_of} for e in self.copies],
            "listed": None if self.listed is None else str(self.listed),
            **{
                name: round(getattr(self, name), 3) for name in ("seconds", "preparing_s", "images_s", "decoder_images_s", "model_images_s")
            },
            "limit": self.limit,
        }
