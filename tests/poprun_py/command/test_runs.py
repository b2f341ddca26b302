"""The command ``poprun-py runs``: the list of runs and the removal of old ones."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.launcher.listed_runs import write_run
from support.terminals import Typist

from poprun_py import process_info
from poprun_py.command.cli import run

OLD = 1000.0


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Make two runs in the folder ``out`` of the working folder, and return this folder."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "out", "old", ended=OLD, began=1e9, tags={"lr": "0.1"})
    write_run(tmp_path / "out", "new", ended=1, began=2e9, code=7, cause="failed")
    (tmp_path / "out" / "latest").symlink_to("new")
    return tmp_path / "out"


def refused(capsys, *words) -> str:
    assert run(["runs", *map(str, words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err.removeprefix("poprun-py: error: ").rstrip("\n")


def listed(capsys, *words):
    assert run(["runs", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    return [line.split()[0] for line in out.splitlines()[2:]], err


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_run_is_first(out, capsys):
    assert listed(capsys, "out") == (["new", "old"], "")
    assert listed(capsys, "out", "--limit", 1) == (
        ["new"], "poprun-py: 1 older run is not listed; --limit 2 lists all runs\n"
    )  # fmt: skip
    assert listed(capsys, "out", "--state", "failed", "--name", "n*")[0] == ["new"]
    assert listed(capsys, "out", "--tag", "lr=0.1")[0] == ["old"]
    assert listed(capsys, "out", "--since", "2020-01-01")[0] == ["new"]


def test_folders_of_other_users_are_not_called_empty(out, capsys, monkeypatch):
    (out / "hers").mkdir(mode=0o000)
    # The superuser may read all folders.
    monkeypatch.setattr(
        "poprun_py.past_runs.listing.run_summary.os.access",
        lambda path, _: Path(path).stat().st_mode & 0o500 == 0o500,
    )
    warning = (
        "poprun-py: warning: 1 folder in out cannot be read (Permission denied), so the "
        "list of runs is not complete\n"
    )
    assert listed(capsys, "out") == (["new", "old"], warning)
    for name in ("new", "old"):
        shutil.rmtree(out / name)
    assert listed(capsys, "out") == (
        [],
        (f"{warning}poprun-py: there are no readable runs in out\n"),
    )


def test_a_damaged_report_is_explained_in_words(out, capsys):
    (out / "new" / "attempt-1").mkdir(exist_ok=True)
    (out / "new" / "report.json").write_text("{")
    assert run(["runs", "out"]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert note.startswith("note: new: report.json cannot be read (not JSON: Expecting property")
    assert note.endswith("char 1))")


def test_an_option_without_its_value_names_the_help_of_the_command(out, capsys):
    assert refused(capsys, "--tag").endswith("; poprun-py runs --help explains all options")


def test_json_for_programs(out, capsys):
    assert run(["runs", "out", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["folder"]) == (1, str(out))
    newest, oldest = document["runs"]
    assert (newest["name"], newest["state"], newest["exit_code"]) == ("new", "failed", 7)
    assert (oldest["tags"], oldest["steps_per_second"]) == ({"lr": "0.1"}, 4.0)
    assert oldest["folder"] == str(out / "old")


def test_the_folder_is_the_one_that_a_launch_would_use(out, tmp_path, monkeypatch, capsys):
    assert listed(capsys) == ([], (f"poprun-py: there are no runs in {tmp_path}; poprun-py "
                                   "--output-dir . PROGRAM starts a job and records its run in "
                                   "this folder\n"))  # fmt: skip
    monkeypatch.setenv("POPRUN_OUTPUT_DIR", "not-yet")
    assert "no runs in" in listed(capsys)[1]
    monkeypatch.delenv("POPRUN_OUTPUT_DIR")
    (tmp_path / "pyproject.toml").write_text('[tool.poprun-py]\noutput-dir = "out"\n')
    assert listed(capsys)[0] == ["new", "old"]
    (tmp_path / "pyproject.toml").unlink()
    out.rename(tmp_path / "runs")
    assert listed(capsys)[0] == ["new", "old"]
    write_run(tmp_path, "here", ended=1)
    assert listed(capsys)[0] == ["here"]


def test_what_is_refused(out, capsys):
    assert refused(capsys, "out/old") == (
        "out/old is the folder of a single run; give the folder that contains the runs, or "
        "show this run with poprun-py report out/old"
    )
    assert refused(capsys, "none").startswith("none: No such file or directory; expected")
    assert "did you mean" in refused(capsys, "--stat", "failed")
    assert "expected a number of seconds" in refused(capsys, "out", "--since", "x")
    assert refused(capsys, "out", "--yes") == (
        "--yes can only be used with --remove-older; add --remove-older AGE, or omit --yes"
    )
    assert refused(capsys, "out", "--remove-older", "1s", "--limit", 3) == (
        "--remove-older and --limit cannot be used together; omit one of the two options"
    )
    assert listed(capsys, "out", "--state", "lost") == (
        [], "poprun-py: no run in out matches the given filters\n"
    )  # fmt: skip


def test_a_script_confirms_the_removal(out, capsys):
    assert run(["runs", "out", "--remove-older", "500s"]) == 2
    shown = capsys.readouterr()
    assert shown.out.splitlines()[2].startswith("old ")
    assert shown.err.endswith(
        "terminal; no run was removed; add --yes to remove runs without confirmation\n"
    )
    assert names(out) == ["latest", "new", "old"]
    assert run(["runs", "out", "--remove-older", "500s", "--yes"]) == 0
    assert capsys.readouterr().err == "poprun-py: removed 1 run\n"
    assert names(out) == ["latest", "new"]
    assert run(["runs", "out", "--remove-older", "500s", "--yes"]) == 0
    assert capsys.readouterr().err == (
        "poprun-py: nothing was removed, because no run in out ended more than 500s ago\n"
    )


def test_a_user_is_asked(out, tmp_path):
    command = (sys.executable, "-m", "poprun_py", "runs", "out", "--remove-older", "500s")
    for answer, left in (("\r", "old"), ("n\r", "old"), ("\x03", "old"), ("y\r", "")):
        with Typist(command, cwd=tmp_path) as user:
            user.expect(r"old +finished.*remove the folders of 1 run \(\d+ KiB\)\? \[y/N\]: ")
            # Python does not notice a Ctrl-C between its question and its wait for the answer.
            user.wait_until(lambda pid=user.pid: process_info.state_letter(pid) == "S")
            user.type(answer)
            assert user.ended() == (130 if answer == "\x03" else 1 if left else 0)
        assert names(out) == sorted(filter(None, ["latest", "new", left]))
    assert "removed 1 run" in user.seen
