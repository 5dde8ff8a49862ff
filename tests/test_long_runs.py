"""The report of the long runs counts what ran, and says what did not."""

from __future__ import annotations

import re
from pathlib import Path

import long_runs
import pytest
from long_runs import RUNS, Result, main, read, text_of

XML = """<testsuites><testsuite name="pytest"><testcase name="a" time="1.5">
<properties><property name="resumed" value="3 of 4" /></properties></testcase>{more}</testsuite></testsuites>"""


def result(tmp_path: Path, xml: str) -> Result:
    (tmp_path / "report.xml").write_text(xml)
    made = Result(RUNS[0])
    read(tmp_path / "report.xml", made)
    return made


def test_what_ran_is_counted(tmp_path: Path) -> None:
    good = result(tmp_path, XML.format(more=""))
    assert (good.passed, good.failed, good.counted, good.seconds) == (1, (), ("resumed 3 of 4",), 1.5)
    assert "| 1 | right | resumed 3 of 4 | 2 |" in text_of([good])


@pytest.mark.parametrize("kind", ["failure", "error", "skipped"])
def test_what_failed_or_was_left_out_is_no_success(kind: str, tmp_path: Path) -> None:
    bad = result(tmp_path, XML.format(more=f'<testcase name="b"><{kind} message="why" /></testcase>'))
    assert (bad.passed, bad.failed) == (1, ("b: why",))
    assert "| 2 | 1 failed |" in text_of([bad])
    assert "- b: why" in text_of([bad])


def test_no_test_at_all_is_a_failure(tmp_path: Path) -> None:
    assert result(tmp_path, "<testsuites><testsuite /></testsuites>").failed == ("no test ran",)


def test_a_machine_that_mounts_nothing_is_said_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_runs, "NOTED", tmp_path / "noted")
    monkeypatch.setattr(long_runs, "MOUNTING", ("unshare-is-not-here",))
    monkeypatch.setattr("sys.argv", ["long_runs", "--only", "mounts", "--docs", str(tmp_path / "faults.md")])
    assert main() == long_runs.NOT_RUN
    assert "not run: this machine mounts nothing (unshare: No such file or directory)" in capsys.readouterr().out
    assert "## Long runs\n" in (tmp_path / "faults.md").read_text()


def test_an_interrupted_command_goes_on_and_begins_anew_when_all_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def carried_out(run: long_runs.Run) -> Result:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(run.name)
        return Result(run, 1, (), ("a 1",), 2.0)

    monkeypatch.setattr(long_runs, "NOTED", tmp_path / "noted")
    monkeypatch.setattr(long_runs, "RUNS", RUNS[:3])
    monkeypatch.setattr(long_runs, "carried_out", carried_out)
    monkeypatch.setattr("sys.argv", ["long_runs", "--docs", str(tmp_path / "faults.md")])
    with pytest.raises(KeyboardInterrupt):
        main()
    assert not (tmp_path / "faults.md").exists()
    ran.clear()
    assert main() == 0
    assert ran == [RUNS[2].name]
    text = (tmp_path / "faults.md").read_text()
    assert all(f"| {run.words} | 1 | right | a 1 | 2 |" in text for run in RUNS[:3])
    assert not (tmp_path / "noted").exists()


def test_what_failed_is_noted_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "NOTED", tmp_path / "noted")
    monkeypatch.setattr(long_runs, "carried_out", lambda run: Result(run, 0, ("b: why",)))
    monkeypatch.setattr("sys.argv", ["long_runs", "--only", RUNS[0].name])
    assert (main(), main()) == (1, 1)
    monkeypatch.setattr(long_runs, "carried_out", lambda run: Result(run, 1))
    monkeypatch.setattr("sys.argv", ["long_runs", "--only", RUNS[0].name, "--anew"])
    assert main() == 0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_is_of_tests_that_are_there(run: long_runs.Run) -> None:
    for place in run.tests:
        file, _, name = place.partition("::")
        text = (long_runs.ROOT / file).read_text()
        if run.mounts:
            assert "pytestmark = pytest.mark.mounts" in text
        else:
            marked = text.partition(f"def {name.partition('[')[0]}(")[0].rpartition("\n\n\n")[2]
            assert re.search(r"pytest\.param\(.*marks=pytest\.mark\.long[,)]", marked), name
