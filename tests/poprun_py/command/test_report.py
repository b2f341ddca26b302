"""The command ``poprun-py report``, and the page that every job writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from support.launcher.run_folders import RUN_ID, make_run

from poprun_py.command.cli import run


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make a run in the folder ``runs`` and return its folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / RUN_ID
    make_run(folder, attempts=1, instances=2, steps=10)
    (tmp_path / "runs" / "latest").symlink_to(RUN_ID)
    return folder


def refused(capsys, *words) -> str:
    assert run(["report", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("poprun-py: error: ").rstrip("\n")


@pytest.mark.parametrize("named", [RUN_ID, "latest", f"runs/{RUN_ID}"])
def test_page_is_beside_the_report(made, capsys, named):
    assert run(["report", named]) == 0
    page = made / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text().endswith("</html>\n")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_output_and_folder_of_runs(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir("/")
    words = ["report", "--output-dir", tmp_path / "runs", "-o", tmp_path / "a b.html", "latest"]
    assert run([str(word) for word in words]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/a b.html\n"
    assert not (made / "report.html").exists()


def test_a_run_is_found_by_name_where_the_launcher_keeps_it(made, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").rename(tmp_path / "results")
    (tmp_path / "pyproject.toml").write_text('[tool.poprun-py]\noutput-dir = "results"\n')
    assert run(["report", RUN_ID]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/results/{RUN_ID}/report.html\n"
    monkeypatch.setenv("POPRUN_OUTPUT_DIR", "nowhere")
    assert refused(capsys, "x").endswith("in nowhere (POPRUN_OUTPUT_DIR), which has no runs")
    monkeypatch.delenv("POPRUN_OUTPUT_DIR")
    for number in range(5):
        make_run(tmp_path / "results" / f"old-{number}", attempts=1, instances=1, steps=1)
        os.utime(tmp_path / "results" / f"old-{number}" / "report.json", (number, number))
    assert refused(capsys, "x").endswith(
        f", which has {RUN_ID}, old-4, old-3, old-2, old-1 and 1 older run"
    )


def test_standard_output(made, capsys):
    assert run(["report", "--output", "-", "latest"]) == 0
    out, err = capsys.readouterr()
    assert (out[:15], out[-8:], err) == ("<!DOCTYPE html>", "</html>\n", "")
    assert not (made / "report.html").exists()


def test_open_shows_the_page(made, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
    assert run(["report", "--open", "latest"]) == 0
    assert shown == [(made / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert run(["report", "--open", "latest"]) == 0
    assert (
        "no browser could be started; open the printed path in a browser" in capsys.readouterr().err
    )


def test_refused_command_lines(made, capsys):
    assert "there is no such run" in refused(capsys, "nothing")
    missing = "Missing argument 'RUN'; poprun-py report --help explains all options"
    assert refused(capsys) == missing
    assert "unknown option --opne; did you mean --open?" in refused(capsys, "--opne", "latest")
    assert "expected the path of a file" in refused(capsys, "-o", "no/such/folder.html", "latest")
    assert "expected the path of a file" in refused(capsys, "-o", ".", "latest")
    assert "give --output a path" in refused(capsys, "-o", "-", "--open", "latest")
    (made / "report.json").write_text('{"run_id": "x"}')
    assert "is not a report of a run" in refused(capsys, "latest")


def test_a_report_with_impossible_values_is_refused(made, capsys):
    report = json.loads((made / "report.json").read_text())
    (made / "report.json").write_text(json.dumps(report | {"exit_code": [], "program": 7}))
    assert "is not a report of a run" in refused(capsys, "latest")


def test_help_explains_with_examples(capsys):
    assert run(["report", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: poprun-py report [OPTIONS] RUN" in out
    assert "poprun-py report --open latest" in out


@pytest.mark.mpi
def test_every_job_with_an_output_folder_writes_its_page(poprun, tmp_path):
    done = poprun(
        "-v", "--output-dir", "runs", "-n", 2, "--env", "KEY=hush-1", "sh", "-c", "exit 3"
    )
    assert done.returncode == 3
    page = tmp_path / "runs" / "latest" / "report.html"
    text = page.read_text()
    assert f"the page of the run is {page.resolve()}" in done.stderr
    assert '<span class="pp-badge pp-bad">Failed</span> with exit code 3' in text
    assert "hush-1" not in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


@pytest.mark.mpi
@pytest.mark.sweep
def test_a_job_without_output_writes_its_page(poprun, tmp_path):
    quiet = poprun("--output-dir", "runs", "true")
    (run,) = {path.resolve().name for path in (tmp_path / "runs").iterdir()}
    said = f"poprun-py: the report is runs/{run}/report.html\n"
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", said)
    assert ">Completed</span> after" in (tmp_path / "runs" / "latest" / "report.html").read_text()


@pytest.mark.mpi
def test_page_that_cannot_be_written_is_a_warning(poprun, tmp_path):
    folder = tmp_path / "runs" / "mine"
    (folder / "report.html").mkdir(parents=True)
    folder.chmod(0o700)
    done = poprun("--output-dir", "runs", "echo", "hi", env={"POPRUN_RUN_ID": "mine"})
    assert done.returncode == 0
    assert "hi" in done.stdout
    assert "warning: the page of the run cannot be written" in done.stderr
    assert done.stderr.endswith("poprun-py: the report is runs/mine/report.json\n")
    assert not [name for name in os.listdir(folder) if "partial" in name]  # noqa: PTH208 (names)
    assert Path(folder, "report.json").exists()
