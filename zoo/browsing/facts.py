"""What is known of one checkpoint, in words: for `zoo info --full` and for the page's card."""

from __future__ import annotations

from weights import Checkpoint
from weights.digests import NAMES, in_words
from weights.record import Preprocessing
from zoo.pretrained.records import restriction


def facts(c: Checkpoint) -> dict[str, str]:
    """Say everything that a record knows; what it does not know is left out."""
    published = f"{c.sha256_prefix}… (prefix;" if c.sha256_prefix else "(none recorded;"
    known = c.sha256 or f"{published} the full hash is pinned on first sight in your lock)"
    known += f"\n{c.sha256_reported} reported by {c.reported_by}" if c.sha256_reported else ""
    found = {
        "accuracy": ", ".join(f"{k} {v:g} %" for k, v in c.metrics.items()) + (f" on {c.metrics_data}" if c.metrics_data else ""),
        "preprocessing": preprocessing(c.preprocessing),
        "sources": "\n".join(c.sources),
        "other files": "\n".join(f"{other.source} ({other.format})" for other in c.alternatives),
        "sha256": known,
        "digest": f"{c.digest} ({in_words(c.digest)}, weaker than a SHA-256)" if c.digest else "",
        "licence": c.license + (f": {told}" if (told := restriction(c)) else ""),
        "outputs": "an embedding, no classes" if c.embedding else "",
        "options": ", ".join(f"{k}={v!r}" for k, v in c.options.items()),
        "recipe": c.recipe or "",
        "pixels": c.pixels or "",
        "learnt from": c.provenance,
    }
    return {k: v for k, v in found.items() if v}


def preprocessing(p: Preprocessing) -> str:
    """Say how an image becomes a network's input."""
    how = "both sides" if p.squash else "all of it, in its shape, on grey," if p.letterbox else "the shorter side"
    bound = f", the longer one to {p.longest} px at most" if p.longest else ""
    steps = [
        f"resize {how} to {p.resize} px{bound} ({p.interpolation})" if p.resize else "",
        f"centre crop {p.crop} px" if p.crop else "",
    ]
    scale = f"mean {', '.join(f'{v:g}' for v in p.mean)}, std {', '.join(f'{v:g}' for v in p.std)} of {p.channel_order.upper()} 0..1"
    return "; ".join(s for s in (*steps, scale) if s)


def hash_state(c: Checkpoint) -> str:
    """Say in a word what is published of a file's bytes.

    Returns:
        "full" SHA-256; "reported", if others found it and nobody published it; "prefix" of one; "MD5" or "SHA-1", if only that weaker
        digest is; "pinned", if nothing is published and the hash that came first is kept in the user's lock.
    """
    if c.sha256 or c.sha256_reported or c.sha256_prefix:
        return "full" if c.sha256 else "reported" if c.sha256_reported else "prefix"
    return NAMES[c.digest.partition(":")[0]] if c.digest else "pinned"
