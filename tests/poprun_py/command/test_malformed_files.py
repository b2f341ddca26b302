"""Malformed input files give a result or an error of one line, never a traceback."""

from __future__ import annotations

import json
import os

import pytest
from support.launcher.lying_json import lying_texts, lying_values
from support.launcher.run_folders import a_plan, make_run
from support.launcher.sysfs_trees import SNAPSHOTS

from poprun_py.command import cli
from poprun_py.display.formatting import read_json
from poprun_py.planning.plan_file import plan_to_json

# Only every 601st or 47th change of a document is tested. Prime numbers reach all combinations.
FEW, MANY = 601, 47


@pytest.fixture
def run(capsys):
    """Return a function that runs a command line and checks its exit code and its error."""

    def runs(words, lie):
        try:
            code = cli.run([str(word) for word in words])
        except Exception as error:
            raise AssertionError(f"{words}: {lie!r}") from error
        out, err = capsys.readouterr()
        assert code in (0, 2), (words, lie, code, err)
        if code:
            assert err.startswith("poprun-py: error: "), (words, lie, err)
            assert err.count("\n") == 1, (words, lie, err)
            assert len(err) < 1000, (words, lie, len(err))
        return code, out

    return runs


def lies(document, every, texts=slice(None)):
    yield from list(lying_texts(document))[texts]
    for lie in lying_values(document, every=every):
        yield lie, json.dumps(lie).encode()


def forms_of(path):
    """Return the command lines that read each kind of file."""
    plan = ["--print-topology=tree", "--print-topology=json", "--export-plan=-"]
    machine = ["--print-topology=tree", "--print-topology=svg"]
    return {
        # Without --dry-run, the program in the file would be run.
        "plan": [["--from-plan", path, "--dry-run", form] for form in plan],
        "hardware": [["--hardware", path, "-n", "2", form] for form in machine],
        "options": [["--import-config", path, "--dry-run"]],
    }  # fmt: skip


DOCUMENTS = {
    "plan": lambda: plan_to_json(a_plan(2, env=("A=1",))),
    "hardware": lambda: json.loads((SNAPSHOTS / "example.json").read_text()),
    "options": lambda: {
        "num_instances": 2, "num_replicas": 4, "env": ["A=1"], "host": "a", "timeout": "5s",
        "program": ["true"], "hang_timeout": 5, "mpi_global_args": ["-x"],
    },
}  # fmt: skip


@pytest.mark.parametrize("every", [FEW, pytest.param(MANY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_malformed_file_is_read_or_refused(run, tmp_path, monkeypatch, what, every):
    monkeypatch.setenv("A", "1")
    path, document = tmp_path / "told.json", DOCUMENTS[what]()
    path.write_text(json.dumps(document))
    forms = forms_of(path)[what]
    assert {run(words, "none")[0] for words in forms} == {0}
    for number, (lie, data) in enumerate(lies(document, every)):
        path.write_bytes(data)
        run(forms[number % len(forms)], lie)


@pytest.mark.parametrize("every", [FEW, pytest.param(MANY, marks=pytest.mark.sweep)])
def test_a_malformed_run_is_shown_and_compared_or_refused(run, tmp_path, monkeypatch, every):
    monkeypatch.chdir(tmp_path)
    files = make_run(tmp_path / "one", instances=2, steps=6, attempts=2)
    make_run(tmp_path / "two", instances=2, steps=6)
    forms = [
        ["report", "-o", "page.html", "one"],
        ["compare", "one", "two"],
        ["compare", "--format", "json", "two", "one"],
        ["compare", "--output", "x.html", "two", "one"],
    ]
    assert {run(words, "none")[0] for words in forms} == {0}
    attempt, number = tmp_path / "one" / "attempt-2", 0
    names = ["plan.json", "instance-0.device.json", "steps.jsonl", "looks.jsonl"]
    for place, path in enumerate((files.report, *(attempt / name for name in names))):
        before = path.read_bytes()
        is_lines = path.suffix == ".jsonl"
        document = json.loads(before.splitlines()[0] if is_lines else before)
        # All files have the same reader, so each is tested with a third of the texts.
        texts = slice(None) if every == MANY else slice(place % 3, None, 3)
        for lie, data in lies(document, every, texts):
            path.write_bytes(data + b"\n")
            code, _ = run(forms[(number := number + 1) % len(forms)], (path.name, lie))
            # If another file than the report is damaged, the rest of the run is shown.
            assert path == files.report or code == 0 or isinstance(lie, dict), (path.name, lie)
        path.write_bytes(before)


@pytest.mark.parametrize(("text", "problem"), [
    (b"[" * 100_000, "the JSON value nests too deeply"),
    ('{"a": ' * 100_000, "the JSON value nests too deeply"),
    (b'{"a\xff": 1}', "byte 3 is not UTF-8"),
    (b'{"a": {"b": 1, "c": 2, "b": 1}}', "'b' is given twice"),
    (b"9" * 5000, "Exceeds the limit"),
    (b"", "Expecting value"),
])  # fmt: skip
def test_json_errors_are_short(text, problem):
    with pytest.raises(ValueError) as caught:
        read_json(text)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_path_that_is_not_a_file_is_refused(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none"):
        for forms in forms_of(path).values():
            assert run(forms[0], path)[0] == 2
