"""A conversion as one HTML page that needs nothing else: the verdict, every layer's error, every tensor's steps, pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from convert.kinds import is_mapping, is_row

FILTERS = 64
"""Filters of the first layer that are drawn."""
SCALE = 6
"""Pixels that one number of a filter is drawn with."""
FLOOR, CEILING = 1e-16, 1.0
"""Relative errors between which a bar grows from nothing to its full length, by their logarithm."""
TICKS = 5
"""Marks of the bars' axis, the first at `FLOOR` and the last at `CEILING`."""
GOOD, POOR = 1e-4, 1e-2
"""Relative errors up to which a bar is green, and from which on it is red."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --dim: #6a6a70; --line: #dcdce0; --page: #fff; --band: #f5f5f7;
  --good: #1d7f3f; --fair: #b26a00; --poor: #c02626; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --dim: #9a9aa2; --line: #3a3a40; --page: #161618; --band: #202024;
  --good: #4cc26e; --fair: #e0a03c; --poor: #f26d6d; } }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.5rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2.5rem 0 .5rem; }
.verdict { margin: 1.25rem 0; padding: .8rem 1rem; border-left: .35rem solid; background: var(--band); font-weight: 600; }
.proven { border-color: var(--good); } .unproven { border-color: var(--fair); } .failed { border-color: var(--poor); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; white-space: nowrap; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font: .92em ui-monospace, monospace; } td code { white-space: nowrap; }
.bar { display: inline-block; width: 7rem; height: .55rem; background: var(--line); border-radius: .3rem; overflow: hidden; }
.bar i { display: block; height: 100%; } .good { background: var(--good); } .fair { background: var(--fair); }
.poor { background: var(--poor); }
.errors.bar, .axis { display: block; width: 16rem; } .axis { position: relative; height: 1.4em; }
.axis span { position: absolute; transform: translateX(-50%); } .axis span:first-child { transform: none; }
.axis span:last-child { transform: translateX(-100%); }
.errors.bar { margin-top: .35rem; background: repeating-linear-gradient(90deg, var(--dim) 0 1px, var(--line) 1px 25%); border-radius: 0; }
.side { display: flex; flex-wrap: wrap; gap: 2rem; } figure { margin: .5rem 0; } figcaption { color: var(--dim); font-size: .85rem; }
img { image-rendering: pixelated; max-width: 100%; } img.photograph { image-rendering: auto; max-height: 9rem; border-radius: .3rem; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--dim); }
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """An image, and what the converted network says of it.

    Attributes:
        name: the image's.
        thumbnail: uint8 (H, W, 3), a small one.
        predictions: labels with their probabilities, the likeliest first.
        truth: its label, "" where that is unknown.
    """

    name: str
    thumbnail: np.ndarray
    predictions: Sequence[tuple[str, float]]
    truth: str = ""


@dataclass(frozen=True, slots=True)
class Transform:
    """Where one tensor of ours came from.

    Attributes:
        ours, theirs: its names.
        shape, stored_shape: here and in the file.
        steps: from there to here, in words.
        convention: of a kernel, what the layer that trained it computed.
        exact: whether every step can be taken back bit for bit.
    """

    ours: str
    theirs: str
    shape: Sequence[int]
    stored_shape: Sequence[int]
    steps: Sequence[str]
    convention: str = ""
    exact: bool = True


@dataclass(slots=True)
class Facts:
    """All that a report tells; what is empty is left out.

    Attributes:
        title: of the page, "VGG19 from vgg19.h5".
        source: facts of the file, name by name: path, sha256, format, framework, kernels …
        certificate: as `convert.certificate.Certificate.to_json` gives it.
        transforms: of every tensor.
        filters: the first layer's kernels (O, I, h, w) in the file's own orientation and in ours.
        samples: predictions on images.
        decision: how a kernel convention that the file doesn't tell was decided, in words and numbers.
        diagnosis: of a conversion that failed: its facts, name by name.
        notes: what was folded, filled in or left out.
    """

    title: str
    source: Mapping[str, Any]
    certificate: Mapping[str, Any]
    transforms: Sequence[Transform] = ()
    filters: tuple[np.ndarray, np.ndarray] | None = None
    samples: Sequence[Sample] = ()
    decision: str = ""
    diagnosis: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: Sequence[str] = ()


def render(facts: Facts) -> str:
    """Draw the page: one file, no scripts, nothing from elsewhere; the same facts give the same text.

    Args:
        facts: what it tells. All text is escaped: a file's words can't become part of the page.
    """
    sections = [
        _facts("The file", facts.source),
        _facts("What went wrong", facts.diagnosis),
        _section("How the kernel convention was decided", f"<pre><code>{escape(facts.decision)}</code></pre>" if facts.decision else ""),
        _evidence(facts.certificate),
        _filters(facts.filters),
        _samples(facts.samples),
        _section("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in facts.notes) + "</ul>" if facts.notes else ""),
        _transforms(facts.transforms),
    ]
    verdict = str(facts.certificate.get("verdict", "UNPROVEN"))
    against = any(one.get("contradicts") for one in facts.certificate.get("evidence", ()))
    state = "failed" if facts.diagnosis or against else "proven" if facts.certificate.get("proven") else "unproven"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(facts.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(facts.title)}</h1>\n<p class="verdict {state}">{escape(verdict)}</p>\n' + "".join(sections) + "</body>\n</html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>\n" if body else ""


def _facts(heading: str, facts: Mapping[str, Any]) -> str:
    told = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{_value(value)}</dd>" for name, value in facts.items() if value not in (None, "", [], {})
    )
    return _section(heading, f"<dl>{told}</dl>" if told else "")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if is_mapping(value):
        return escape(", ".join(f"{key} {_plain(inner)}" for key, inner in value.items()))
    if is_row(value):
        return "<br>".join(_value(inner) for inner in value)
    return escape(str(value))


def _plain(value: Any) -> str:
    if is_row(value):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _evidence(certificate: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for one in certificate.get("evidence", ()):
        mark = "✓" if one.get("proven") else "✗" if one.get("contradicts") else "·"
        parts.append(f"<p>{mark} <b>{escape(str(one.get('kind', '')))}</b>: {escape(str(one.get('detail', '')))}</p>")
        layers = one.get("layers") or ()
        if layers:
            rows = "".join(_layer(layer) for layer in layers)
            heads = f"<th>theirs</th><th>ours</th><th>shape</th><th>largest difference</th><th>relative</th><th>{_axis()}</th>"
            parts.append(f"<p>Bars show the relative difference on a logarithmic axis: green up to {GOOD:g}, red above {POOR:g}.</p>")
            parts.append(f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>')
    return _section("Evidence, layer by layer", "\n".join(parts))


def _layer(layer: Mapping[str, Any]) -> str:
    relative = _number(layer.get("relative"))
    cells = (f"<td><code>{escape(str(layer.get(side, '')))}</code></td>" for side in ("theirs", "ours"))
    numbers = (f'<td class="number">{_error(_number(layer.get(key)))}</td>' for key in ("max_abs", "relative"))
    return f"<tr>{''.join(cells)}<td>{_shape(layer.get('shape', ()))}</td>{''.join(numbers)}<td>{_bar(relative)}</td></tr>"


def _number(value: Any) -> float:
    """Read an error; what JSON could not hold, None, was infinite."""
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else math.inf


def _error(value: float) -> str:
    return "0" if value == 0 else "∞" if math.isinf(value) else f"{value:.2e}"


def _axis() -> str:
    """Write the numbers of the bars' axis, each over its mark."""
    low, high = math.log10(FLOOR), math.log10(CEILING)
    places = [index / (TICKS - 1) for index in range(TICKS)]
    marks = (f'<span style="left:{100 * place:g}%">{10 ** (low + place * (high - low)):g}</span>' for place in places)
    return f'<span class="axis">{"".join(marks)}</span>'


def _bar(relative: float) -> str:
    """Draw an error as a bar on the logarithmic axis."""
    inside = min(max(relative, FLOOR), CEILING)
    width = round(100 * (math.log10(inside) - math.log10(FLOOR)) / (math.log10(CEILING) - math.log10(FLOOR)), 1)
    colour = "good" if relative <= GOOD else "fair" if relative <= POOR else "poor"
    return f'<span class="errors bar" title="{_error(relative)}"><i class="{colour}" style="width:{width}%"></i></span>'


def _transforms(transforms: Sequence[Transform]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(one.ours)}</code></td><td><code>{escape(one.theirs)}</code></td><td>{_shape(one.stored_shape)}</td>"
        f"<td>{_shape(one.shape)}</td><td>{escape(one.convention)}</td><td>{escape('; '.join(one.steps))}</td>"
        f"<td>{'' if one.exact else 'rounds'}</td></tr>"
        for one in transforms
    )
    heads = "<th>ours</th><th>in the file</th><th>shape there</th><th>shape here</th><th>trained as</th><th>steps</th><th></th>"
    body = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    return _section(
        "Tensors", f"<details><summary>{len(transforms)} tensors and their steps</summary>{body}</details>" if transforms else ""
    )


def _shape(shape: Sequence[int]) -> str:
    return escape("x".join(map(str, shape)))


def _filters(filters: tuple[np.ndarray, np.ndarray] | None) -> str:
    if filters is None or any(kernels.ndim != 4 or not kernels.size for kernels in filters):
        return ""
    sides = zip(filters, ("as the file has them", "as the network has them"), strict=True)
    figures = "".join(
        f'<figure><img alt="filters of the first layer, {words}" src="{_png(filter_sheet(kernels))}">'
        f"<figcaption>{words}, {_shape(kernels.shape)}</figcaption></figure>"
        for kernels, words in sides
    )
    turned = filters[0].shape != filters[1].shape or not np.array_equal(filters[0], filters[1])
    words = "They differ by the steps below." if turned else "They are the same: nothing had to be turned."
    return _section("Filters of the first layer", f'<div class="side">{figures}</div><p>{words}</p>')


def filter_sheet(kernels: np.ndarray) -> np.ndarray:
    """Draw kernels (O, I, h, w) as uint8 (H, W, 3): three input channels as colours, else the first as grey; each by its own range."""
    shown = np.asarray(kernels[:FILTERS], np.float32)
    shown = shown[:, :3] if shown.shape[1] == 3 else np.repeat(shown[:, :1], 3, axis=1)
    shown = np.nan_to_num(shown.transpose(0, 2, 3, 1), posinf=0, neginf=0)
    low, high = (reduce(shown, axis=(1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    pixels: np.ndarray = np.rint(255 * (shown - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)
    columns = math.ceil(math.sqrt(len(pixels)))
    height, width = pixels.shape[1] * SCALE, pixels.shape[2] * SCALE
    rows = math.ceil(len(pixels) / columns)
    sheet = np.full((rows * (height + 2) + 2, columns * (width + 2) + 2, 3), 128, np.uint8)
    for number, tile in enumerate(pixels):
        top, left = 2 + number // columns * (height + 2), 2 + number % columns * (width + 2)
        sheet[top : top + height, left : left + width] = tile.repeat(SCALE, 0).repeat(SCALE, 1)
    return sheet


def _samples(samples: Sequence[Sample]) -> str:
    rows = "".join(
        f'<tr><td><img class="photograph" alt="{escape(one.name, quote=True)}" src="{_png(one.thumbnail)}"></td><td>{escape(one.name)}'
        + (f"<br><small>truth: {escape(one.truth)}</small>" if one.truth else "")
        + f"</td><td>{_predictions(one)}</td></tr>"
        for one in samples
    )
    return _section("Predictions", f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else "")


def _predictions(sample: Sample) -> str:
    return "".join(
        f'<div><span class="bar"><i class="{"good" if label == sample.truth or not sample.truth else "fair"}" '
        f'style="width:{min(max(100 * probability, 0), 100):.1f}%"></i></span> {escape(label)} {probability:.1%}</div>'
        for label, probability in sample.predictions
    )


def _png(pixels: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels, np.uint8)).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
