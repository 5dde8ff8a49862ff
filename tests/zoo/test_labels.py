from pathlib import Path

import pytest

from zoo.labels import TABLES, Label, labels


def test_imagenet_has_a_thousand_classes_told_apart_by_their_ids() -> None:
    table = labels("imagenet1k")
    ids = [label.wnid for label in table]
    assert len(table) == len(set(ids)) == 1000
    assert ids == sorted(ids)  # the challenge's class order
    assert table[0] == Label("tench", "n01440764")
    assert table[281] == Label("tabby", "n02123045")
    assert (table[134].wnid, table[517].wnid) == ("n02012849", "n03126707")  # the bird and the machine that are both "crane" elsewhere
    assert (table[638].wnid, table[639].wnid) == ("n03710637", "n03710721")  # the two "maillot"


def test_cifar10_has_ten_names_and_no_ids() -> None:
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    assert [label.name for label in labels("cifar10")] == names.split()
    assert {label.wnid for label in labels("cifar10")} == {None}


@pytest.mark.reference
def test_imagenet_names_are_torchvisions_and_ids_are_timms() -> None:
    import timm
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    synsets = Path(timm.__file__).parent / "data" / "_info" / "imagenet_synsets.txt"
    assert [label.name for label in labels("imagenet1k")] == _IMAGENET_CATEGORIES
    assert [label.wnid for label in labels("imagenet1k")] == synsets.read_text().split()


@pytest.mark.parametrize("table", sorted(TABLES.glob("*.tsv")), ids=lambda table: table.stem)
def test_every_table_is_well_formed(table: Path) -> None:
    text = table.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for label in labels(table.stem):
        assert label.name == label.name.strip() != ""
        assert label.wnid is None or (len(label.wnid) == 9 and label.wnid[0] == "n" and label.wnid[1:].isdigit())


def test_unknown_labels_are_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match=r"no labels named 'imagenet'; there are cifar10, .*imagenet1k"):
        labels("imagenet")


@pytest.mark.reference
@pytest.mark.parametrize("count", [11_221, 11_821, 21_841, 21_842, 21_843])
def test_the_larger_sets_are_in_the_order_that_timm_knows_by_their_number_of_classes(count: int) -> None:
    from timm.data import ImageNetInfo  # pyright: ignore[reportPrivateImportUsage]
    from timm.data.imagenet_info import infer_imagenet_subset
    from timm.models import PretrainedCfg  # pyright: ignore[reportPrivateImportUsage]

    from recipes.registry_rows import LABELS

    subset = infer_imagenet_subset(PretrainedCfg(num_classes=count).to_dict())
    assert subset is not None
    info = ImageNetInfo(subset)
    ours = labels(LABELS[count])
    assert [label.wnid for label in ours] == info.label_names()
    told = [info.label_name_to_description(name, detailed=False) for name in info.label_names()[::97]]
    assert [label.name for label in ours[::97]] == [names.partition(", ")[0] for names in told]


def test_the_thousand_classes_stand_where_the_larger_sets_publishers_say() -> None:
    """The first of the indices with which Swin's authors take ImageNet-1k's classes from their 21,841."""
    rows = {label.wnid: row for row, label in enumerate(labels("imagenet22k"))}
    assert [rows[label.wnid] for label in labels("imagenet1k")[:10]] == [359, 368, 460, 475, 486, 492, 496, 514, 516, 525]


@pytest.mark.reference
@pytest.mark.parametrize(("table", "theirs"), [("coco91", "_COCO_CATEGORIES"), ("voc21", "_VOC_CATEGORIES")])
def test_names_of_detectors_and_segmenters_are_torchvisions(table: str, theirs: str) -> None:
    from torchvision.models import _meta

    ours = {"background": "__background__", "no such class": "N/A"}
    assert [ours.get(label.name, label.name) for label in labels(table)] == getattr(_meta, theirs)
