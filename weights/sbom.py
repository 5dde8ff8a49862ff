"""A bill of materials of a project's weights: what its lock uses, as CycloneDX 1.6, for the people who must know licences and origins.

The same lock and registry give the same bytes: no time is in it, and its serial number is made of its content.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weights.errors import NoSuchFile
from weights.lock import Entry, Lock, project_lock
from weights.record import Checkpoint
from weights.registry import checkpoints

SPDX = (
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC-BY-4.0",
    "CC-BY-NC-4.0",
    "CC-BY-NC-SA-4.0",
    "CC-BY-SA-4.0",
    "CC0-1.0",
    "GPL-3.0-only",
    "GPL-3.0-or-later",
    "ISC",
    "LGPL-3.0-only",
    "MIT",
    "MPL-2.0",
    "Unlicense",
    "0BSD",
    "OpenMDW-1.0",
)
"""Licences that CycloneDX takes by their identifier; any other goes in by its name."""
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "kernelzoo/sbom")


def lock_entries(path: Path | None) -> tuple[Path, list[Entry]]:
    """Read a lock, by default the nearest `weights.lock` upwards of the working folder.

    Raises:
        NoSuchFile: there is none.
        BadLock: it is no lock, or can't be read.
    """
    found = path or project_lock()
    if found is None:
        raise NoSuchFile("no weights.lock lies here or above: zoo lock NAME writes one, and --lock FILE names another.")
    return found, list(Lock.read(found).entries.values())


def sbom(project: str, entries: Iterable[Entry], version: str) -> str:
    """Write the bill of materials.

    Args:
        project: the name of what uses the weights.
        entries: of its lock.
        version: of kernelzoo.

    Returns:
        CycloneDX 1.6, JSON.
    """
    rows = {f"{row.model}:{row.tag}": row for row in checkpoints()}
    components = [_component(entry, rows.get(entry.key)) for entry in sorted(entries, key=lambda entry: entry.key)]
    root = f"project:{project}"
    made: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "kernelzoo", "version": version}]},
            "component": {"type": "application", "bom-ref": root, "name": project},
        },
        "components": components,
        "dependencies": [
            {"ref": root, "dependsOn": [one["bom-ref"] for one in components]},
            *({"ref": one["bom-ref"]} for one in components),
        ],
    }
    serial = uuid.uuid5(NAMESPACE, json.dumps(made, sort_keys=True))
    return json.dumps({**made, "serialNumber": f"urn:uuid:{serial}"}, indent=2, ensure_ascii=False) + "\n"


def _component(entry: Entry, row: Checkpoint | None) -> dict[str, Any]:
    if row and row.sha256 and entry.sha256 and row.sha256 != entry.sha256:
        row = None  # the registry's is of other bytes
    model, _, tag = entry.key.partition(":") if "://" not in entry.key else (entry.key, "", "")
    hashes = [{"alg": "SHA-256", "content": entry.sha256}] if entry.sha256 else []
    made: dict[str, Any] = {"type": "machine-learning-model", "bom-ref": f"weights:{entry.key}", "name": model}
    if tag:
        made["version"] = tag
    if hashes:
        made["hashes"] = hashes
    made["licenses"] = [{"license": {"id": entry.license} if entry.license in SPDX else {"name": entry.license}}]
    references: list[dict[str, Any]] = []
    for source in entry.sources:
        reference: dict[str, Any] = {"type": "distribution", "url": quote(source, safe=":/@?&=%+,;~#!$'()*[]")}
        references.append(reference | ({"hashes": hashes} if hashes else {}))
    if row and row.recipe and "://" in row.recipe:
        references.append({"type": "documentation", "url": quote(row.recipe, safe=":/@?&=%+,;~#!$'()*[]"), "comment": "training recipe"})
    made["externalReferences"] = references
    if row:
        made["modelCard"] = _card(row)
    facts = {"format": entry.format, "size_bytes": entry.size_bytes, "hash": "full" if entry.sha256 else "not known in full"}
    facts |= {"provenance": row.provenance} if row else {}
    made["properties"] = [{"name": f"kernelzoo:{name}", "value": str(value)} for name, value in sorted(facts.items()) if value is not None]
    return made


def _card(row: Checkpoint) -> dict[str, Any]:
    card: dict[str, Any] = {
        "modelParameters": {"task": "image-classification", "modelArchitecture": row.model, "inputs": [{"format": "image"}]},
    }
    if row.metrics:
        measured = [{"type": name, "value": f"{value:g}", "slice": row.metrics_data or ""} for name, value in sorted(row.metrics.items())]
        card["quantitativeAnalysis"] = {"performanceMetrics": measured}
    return card
