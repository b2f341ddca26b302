"""The command ``poprun-py scale``, from its options to real runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import wait_until

from poprun_py.command.cli import run
from poprun_py.command.scale import (
    _split_words,
    options_after_program,
    parse_counts,
    scaling_runs,
)
from poprun_py.errors import UsageError
from poprun_py.past_runs.pages import run_page

STEPS = """
import sys, time
import popdist_py
from popdist_py import heartbeat
popdist_py.init()
print("arguments", *sys.argv[1:])
while "forever" in sys.argv or heartbeat.steps() < 12:
    time.sleep(0.01)
    heartbeat.step(samples=8)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with a program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(STEPS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        ("train.py --instances 1,2 --lr 1", "--instances 1,2", "train.py --lr 1"),
        ("--repeats=2 --host a -m x --format json", "--repeats=2 --format json", "--host a -m x"),
        ("train.py --instances", "--instances", "train.py"),
    ],
)
def test_options_of_scale_may_stand_anywhere(words, own, others):
    assert _split_words(words.split()) == (own.split(), others.split())


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (("train.py", "--timeout=5", "--lr", "1", "--timeout", "6"), ["--timeout"]),
        (("train.py", "--num-instances", "2", "--lr", "x", "-n", "2"), []),
    ],
)
def test_options_after_the_program_that_scale_would_accept_before_it(program, names):
    assert options_after_program(program) == names


def test_an_option_after_the_program_causes_a_warning(here, capsys):
    words = ["scale", "train.py", "--instances", "1,9999", "--num-replicas", "4"]
    assert run(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--num-replicas after train.py is passed to train.py, not to poprun-py; to pass" in said
    run([*words[:4], "--", *words[4:]])
    assert "is an argument of" not in capsys.readouterr().err


def test_help_shows_examples(golden, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["scale", "--help"]) == 0
    golden("scale_help.txt", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (1,)), ("1,2,4", (1, 2, 4)), ("1-4", (1, 2, 3, 4)), ("8, 1-2", (8, 1, 2))],
)
def test_forms_of_counts(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "1,", "4-1", "1-", "-1", "two", "1-65", "1-1000000", "²"]
)
def test_texts_that_are_not_counts_are_refused(text):
    with pytest.raises(UsageError, match="numbers of instances, such as 1,2,4 or 1-4"):
        parse_counts(text)


def test_a_count_given_twice_is_refused():
    with pytest.raises(UsageError, match="2 is given twice"):
        parse_counts("1-3,2")


def test_too_many_counts_are_refused():
    with pytest.raises(UsageError, match="at most 64"):
        parse_counts("1-40,101-140")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True), st.integers(1, 5))
def test_the_runs_of_all_counts_alternate(counts, repeats):
    runs = scaling_runs("scale-x", counts, repeats)
    assert [count for _, count in runs] == counts * repeats
    assert len({name for name, _ in runs}) == len(runs)


@pytest.mark.sweep
@pytest.mark.mpi
def test_a_failed_run_ends_the_series_with_its_report(poprun, script, tmp_path):
    script(
        "import os, sys\n"
        "if os.environ['WORLD_SIZE'] == '2': sys.exit('two are too many')\n"
        "print('not shown')\n"
    )
    done = poprun("scale", "program.py", "--instances", "1,2", "--repeats", "2")
    assert done.returncode == 1
    assert (
        "[2/4] 2 instances: the run failed; its output is in the folder runs/scale-" in done.stderr
    )
    assert "two are too many" in done.stderr
    assert "not shown" not in done.stdout + done.stderr
    assert "note: only 1 of 4 runs is measured" in done.stdout
    assert len(list((tmp_path / "runs").glob("scale-*-n*"))) == 2


@pytest.mark.mpi
def test_ctrl_c_while_a_page_is_written_ends_the_series(here, monkeypatch, capsys):
    """The run is measured, because it had ended before."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_page, "page_text", interrupted)
    (here / "train.py").write_text("print('done')\n")
    assert run(["scale", "train.py", "--instances", "1", "--repeats", "2"]) == 130
    said = capsys.readouterr()
    assert "the page of the run is not written, because the launcher was interrupted" in said.err
    assert "note: only 1 of 2 runs is measured" in said.out


@pytest.mark.mpi
@pytest.mark.sweep
def test_a_program_is_scaled(poprun, here):
    done = poprun(
        "scale", "--num-replicas", "2", "train.py", "--instances", "1,2", "--repeats", "2",
        "--format", "json", "--lr", "1", "--", "--output", "x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    one, two = found["runs"]
    assert (found["measure"], found["scaling"]) == ("samples/s", "weak")
    assert [each["num_instances"] for each in (one, two)] == [1, 2]
    assert [each["num_replicas"] for each in (one, two)] == [2, 2]
    assert len(one["runs"]) == len(two["runs"]) == 2
    assert one["speedup"] == 1.0
    assert two["speedup"] > 1
    folder = here / "runs" / two["runs"][0]
    written = (folder / "attempt-1" / "instance-1.stdout").read_text()
    assert written == "arguments --lr 1 --output x\n"
    prefix = one["runs"][0].removesuffix("-n1-1")
    assert (here / "runs" / f"{prefix}.html").read_text().endswith("</html>")
    names = [path.name for path in (here / "runs").glob("scale-*-n*")]
    assert sorted(names) == sorted([*one["runs"], *two["runs"]])
    done = poprun("compare", *two["runs"], *one["runs"], "--group")
    assert done.returncode == 0, done.stderr
    assert f"compared with {two['runs'][0]} + 1 by samples per second" in done.stdout


@pytest.mark.mpi
@pytest.mark.sweep
@pytest.mark.timeout(120)
def test_a_run_beside_other_load_is_doubtful(poprun, here):
    """The other program is no job of poprun-py, so that it holds no cores."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            for _ in range(2):
                done = poprun("-n", "1", "--output-dir", "runs", "train.py")
                assert done.returncode == 0, done.stderr
        finally:
            other.kill()
    first, second = sorted(path.name for path in (here / "runs").glob("2*"))
    found = json.loads(poprun("compare", "--format", "json", first, second).stdout)
    for run_of in found["runs"]:
        assert "other_load" in [doubt["cause"] for doubt in run_of["doubts"]]
    table = poprun("compare", first, second).stdout
    assert "1.00x*" in table
    assert "\n* other programs used CPUs of the job: " in table


@pytest.mark.mpi
@pytest.mark.sweep
def test_the_time_limit_applies_to_each_run(poprun, here):
    done = poprun("scale", "--timeout", "8", "train.py", "forever", "--instances=1", "--repeats=1")
    assert done.returncode == 0, done.stderr
    assert "note: --timeout ended some runs before their programs" in done.stdout


@pytest.mark.mpi
@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_series_and_shows_the_finished_runs(poprun, script, tmp_path, number):
    script(
        "import os, pathlib, time\n"
        "if os.environ['WORLD_SIZE'] == '2':\n"
        "    pathlib.Path('waits').touch()\n"
        "    time.sleep(600)\n"
    )
    process = poprun("scale", "program.py", "--instances", "1,2", start=True)
    wait_until((tmp_path / "waits").exists)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "[2/6] 2 instances: the run was stopped" in stderr
    assert "note: only 1 of 6 runs is measured" in stdout
    wait_until(lambda: not poprun.survivors())
