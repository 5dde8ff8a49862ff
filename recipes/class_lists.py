"""Write zoo/data/synsets.zip: the classes of ImageNet's larger sets in class order, and the names of all of them.

    python recipes/class_lists.py

The lists are timm's, by the number of classes that its ImageNetInfo knows each by; the name is the first of WordNet's for a synset.
"""

from __future__ import annotations

import zipfile
from importlib.resources import files

from zoo.labels import SYNSETS

LISTS = {
    "imagenet12k": "imagenet12k_synsets.txt",
    "imagenet21k_miil": "imagenet21k_miil_synsets.txt",
    "imagenet22k": "imagenet22k_synsets.txt",
    "imagenet22k_ms": "imagenet22k_ms_synsets.txt",
    "imagenet21k_goog": "imagenet21k_goog_synsets.txt",
}
"""Our name of a list: timm's file."""
EPOCH = (1980, 1, 1, 0, 0, 0)


def main() -> None:
    """Write the file; the same lists give the same bytes."""
    data = files("timm.data") / "_info"
    lists = {name: (data / file).read_text(encoding="utf-8").split() for name, file in LISTS.items()}
    lemmas = dict(line.split("\t") for line in (data / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines())
    wanted = sorted({wnid for wnids in lists.values() for wnid in wnids})
    names = "".join(f"{wnid}\t{lemmas[wnid].partition(', ')[0]}\n" for wnid in wanted if wnid in lemmas)
    with zipfile.ZipFile(SYNSETS, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name, text in {"names.tsv": names, **{name: "\n".join(wnids) for name, wnids in lists.items()}}.items():
            packed.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    print(f"{SYNSETS}: {SYNSETS.stat().st_size:,} bytes, {', '.join(f'{name} {len(wnids):,}' for name, wnids in lists.items())}")


if __name__ == "__main__":
    main()
