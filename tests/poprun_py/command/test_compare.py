"""The command ``poprun-py compare``."""

from __future__ import annotations

import json
import stat

import pytest
from support.launcher.made_runs import MadeAttempt, made_run

from poprun_py.command.cli import run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Make two runs in the folder ``runs``."""
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs", "one")
    attempt = MadeAttempt(values={10: {"accuracy": 0.9}})
    made_run(tmp_path / "runs", "two", instances=2, attempts=(attempt,))
    return tmp_path / "runs"


def test_runs_by_name_and_by_folder(runs, capsys):
    assert run(["compare", "one", str(runs / "two")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["run", "instances", "samples/s"]
    assert shown[2].split()[:4] == ["one", "1", "80", "1.00x"]
    assert shown[3].split()[:5] == ["two", "2", "160", "2.00x", "100%"]


def test_runs_of_another_folder(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert run(["compare", "--output-dir", str(runs), "one", "two"]) == 0
    assert run(["compare", "one", "two"]) == 2
    assert "there is no such run" in capsys.readouterr().err


def test_runs_are_found_by_name_where_the_launcher_keeps_them(runs, capsys, tmp_path, monkeypatch):
    runs.rename(tmp_path / "results")
    monkeypatch.setenv("POPRUN_OUTPUT_DIR", "results")
    assert run(["compare", "one", "two"]) == 0
    made_run(tmp_path, "one")  # a path goes first
    assert run(["compare", "one", "results/one"]) == 0
    capsys.readouterr()
    assert run(["compare", "--output-dir", "runs", "one", "two"]) == 2
    assert (
        "two: there is no such run: expected the folder of a run, or the name of a run in runs "
        in (capsys.readouterr().err)
    )
    monkeypatch.setenv("POPRUN_NUM_INSTANCES", "many")  # a path needs no options
    assert run(["compare", "results/two", "results/one"]) == 0


def test_a_slow_instance_and_a_copied_run_are_mentioned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs", "one", instances=2)
    slow = MadeAttempt(own_seconds={0: 0.05})
    made_run(tmp_path / "elsewhere", "one", instances=2, attempts=(slow,))
    assert run(["compare", "one", "elsewhere/one"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:4]] == ["one", "elsewhere/one"]
    assert "note: instance 1 of 2 is slow (elsewhere/one): a step takes 100 ms" in shown


def test_json(runs, capsys):
    assert run(["compare", "one", "two", "--target", "accuracy=0.9", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measure"], found["scaling"]) == ("samples/s", "weak")
    one, two = found["runs"]
    assert (one["runs"], two["runs"]) == (["one"], ["two"])
    assert two["samples_per_second"]["median"] == pytest.approx(160)
    assert two["reached"]["median"] == pytest.approx(2.0)
    assert one["reached"] is None
    assert one["missing"]["reached"] == "no value with the name of the target was logged"


def test_repetitions_are_grouped_with_group(runs, capsys):
    made_run(runs, "one-again")
    assert run(["compare", "--group", "one", "one-again", "two"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("one + 1 ")
    assert shown[3].startswith("two ")


def test_a_page_is_private_and_complete(runs, capsys, tmp_path):
    assert run(["compare", "one", "two", "--output", "both.html"]) == 0
    page = tmp_path / "both.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert page.read_text().endswith("</html>")
    assert "the page of the comparison is both.html" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*partial"))


def test_unreadable_lines_of_a_run_are_mentioned(runs, capsys):
    with (runs / "one" / "attempt-1" / "steps.jsonl").open("a") as file:
        file.write("no step\n")
    assert run(["compare", "one", "two"]) == 0
    assert "note: one: steps.jsonl: 1 line cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "compare needs at least two runs, but no run was given"),
        (["one"], "compare needs at least two runs, but only the run 'one' was given"),
        (["one", "three"], "three: there is no such run: expected the"),
        (["one", "tow"], "no such run; did you mean two?: "),
        (["one", "runs"], "runs is not the folder of a run: it contains no report.json"),
        (["one", "runs/one"], "one and runs/one are the same run; give each run once"),
        (["one", "two", "--traget", "x"], "unknown option --traget; did you mean --target?"),
        (["one", "two", "--target", "best"], "--target 'best': expected a name and a number"),
        (["one", "two", "--target"], "requires an argument"),
        (["one", "two", "--format", "xml"], "'xml' is not one of 'text', 'json'"),
        (["one", "two", "--output", "x.png"], "expected a file name that ends in .html"),
        (["one", "two", "--output", "no/x.html"], "the folder no does not exist"),
    ],
)
def test_errors_are_one_line(runs, capsys, words, said):
    assert run(["compare", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.startswith("poprun-py: error: ")
    assert shown.err.count("\n") == 1


def test_a_damaged_report_is_mentioned(runs, capsys):
    (runs / "one" / "report.json").write_text("[]")
    assert run(["compare", "one", "two"]) == 2
    assert "is not a report of a run" in capsys.readouterr().err


SOUND = [
    {"state": "ended", "folder": 9},
    {"began_at": 3, "ended_at": "soon"},
    {"exit_code": "all"},
    {"attempts": [{"number": 1}]},
]
BROKEN = [
    {"plan": {"num_instances": "two"}},
    {"plan": {"num_instances": None}},
    {"versions": [3]},
    {"program": 7},
    {"attempts": [{"number": 1, "hosts": 3}]},
    {"attempts": [{"number": 1, "observation": {"instances": [{}]}, "instances": [None]}]},
]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        *((changes, 0, "the page of the comparison is both.html") for changes in SOUND),
        *((changes, 2, "is not a report of a run") for changes in BROKEN),
    ],
)
def test_a_damaged_report_never_causes_a_traceback(runs, capsys, changes, code, said):
    file = runs / "one" / "report.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert run(["compare", "one", "two", "--output", "both.html"]) == code
    assert said in capsys.readouterr().err


def test_help_shows_examples(golden, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["compare", "--help"]) == 0
    golden("compare_help.txt", capsys.readouterr().out)
