"""Text, repr and HTML of configurations, plans, results and views."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from support.launcher.sysfs_trees import SNAPSHOTS
from support.repository import ROOT

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py import (
    InstanceResult,
    JobFailedError,
    LaunchConfig,
    LaunchResult,
    TimeLimitError,
    plan,
)
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.running.supervise.launch_result import Progress
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.stragglers import Straggler
from tools.running.browser import CHROMIUM, open_browser

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)
CONFIG = LaunchConfig(
    program=("train.py", "<b>"), num_instances=2, num_replicas=8, env=("TOKEN=s3cret",), smt=True,
    hardware=str(SNAPSHOTS / "example.json"),
)  # fmt: skip
STDERR = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no <b>\n'
GOOD = InstanceResult(index=0, host="h", pid=4, code=0, progress=Progress(step=30))
BAD = InstanceResult(index=1, host="h", pid=5, code=3, stderr_tail=STDERR, had_last_word=True)
ENDED = LaunchResult(exit_code=0, instances=(GOOD,), seconds=1.25, run_id="r1")
FAILED = LaunchResult(
    exit_code=3, instances=(GOOD, BAD), first_failure=BAD, reason="instance 1 ended", seconds=2
)
VIEW = JobView(
    run_id="r1",
    pid=7,
    program="train.py",
    seconds=75,
    instances=tuple(
        InstanceState(index=index, host="h", phase="training", step=10 * (index + 1), num_steps=9)
        for index in (0, 1)
    ),
    worst=Straggler(
        instance=1, host="h", own_seconds=0.2, median_seconds=0.1, is_slow=True, cause="loading"
    ),
)


@pytest.fixture(scope="module")
def job():
    return plan(CONFIG, environ={"SECRET": "s3cret"}, mpi=MPI)


@pytest.fixture(scope="module")
def values(job):
    return CONFIG, job, ENDED, FAILED, BAD, VIEW


def drawn(value):
    """Return the HTML of a value, which is well-formed XML, as a tree."""
    return ElementTree.fromstring(value._repr_html_())


def rows(value):
    return [["".join(cell.itertext()) for cell in row] for row in drawn(value).iter("tr")]


# --- text ---------------------------------------------------------------------------------------


def test_repr_is_one_short_line_without_secrets(values):
    for value in values:
        assert len(repr(value)) < 250
        assert "\n" not in repr(value)
        assert repr(value).startswith(f"{type(value).__name__}(")
        for text in (repr(value), str(value), value._repr_html_()):
            assert "s3cret" not in text
    assert repr(BAD) == "InstanceResult(index=1, host='h', code=3)"
    assert repr(FAILED) == (
        "LaunchResult(exit_code=3, instances=2, seconds=2.00, first_failure=1, "
        "reason='instance 1 ended')"
    )


def test_the_text_of_a_plan_is_a_tree(job):
    first, *tree = str(job).split("\n")
    assert first == "2 instances, 8 replicas, 8 IPUs on localhost"
    assert any("instance 1: CPUs" in line for line in tree)
    assert any("replicas 4-7: IPUs 4-7" in line for line in tree)


def test_the_text_of_a_configuration_is_its_command():
    assert str(CONFIG).replace(" \\\n ", "").split()[:4] == [
        *("poprun-py", "--num-instances", "2", "--num-replicas"),
    ]  # fmt: skip
    assert "--env TOKEN" in str(CONFIG)


def test_the_text_of_a_result_is_a_sentence_or_the_report():
    assert str(ENDED) == "1 instance ended well after 1.2 s (run r1)"
    report = str(FAILED)
    assert report.startswith("poprun-py: instance 1 on h failed first: exit code 3\n")
    # The report repeats stderr, as the reader may not have seen it.
    assert report.endswith("  | ValueError: no <b>")
    assert str(BAD) == "instance 1 on h: exit code 3 (ValueError: no <b>)"
    assert str(GOOD) == "instance 0 on h: ended well"
    assert str(VIEW).splitlines()[0].startswith("train.py: run r1, launcher 7, 1:15, 2 instances")


def test_a_process_that_only_unpickles_a_result_shows_its_report():
    """The process uses no public name of poprun_py."""
    code = (
        "import pickle, sys\n"
        "result = pickle.loads(sys.stdin.buffer.read())\n"
        "print(result)\n"
        "try: result.raise_for_failure()\n"
        "except Exception as error: print(f'{type(error).__name__}: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=pickle.dumps(FAILED), capture_output=True,
        check=True,
    )  # fmt: skip
    with pytest.raises(JobFailedError) as raised:
        FAILED.raise_for_failure()
    assert done.stdout.decode() == f"{FAILED}\nJobFailedError: {raised.value}\n"


# --- failures -----------------------------------------------------------------------------------


def test_raise_for_failure_returns_a_good_result():
    assert ENDED.raise_for_failure() is ENDED


@pytest.mark.parametrize(
    ("result", "kind", "said"),
    [
        (FAILED, JobFailedError, "instance 1 on h failed first: exit code 3 (ValueError: no <b>)"),
        (
            LaunchResult(exit_code=124, timed_out=True, reason="the time limit of 3 s", seconds=3),
            TimeLimitError,
            "the job ended after 3.0 s: the time limit of 3 s",
        ),
        (
            LaunchResult(exit_code=RESUME_EXIT_CODE, instances=(GOOD,)),
            JobFailedError,
            "1 instance stopped at a checkpoint: launch the job again to continue",
        ),
        (LaunchResult(exit_code=143), JobFailedError, "the job ended: signal SIGTERM"),
    ],
)
def test_raise_for_failure_raises_the_error_of_a_bad_result(result, kind, said):
    with pytest.raises(kind) as raised:
        result.raise_for_failure()
    assert str(raised.value) == said
    assert raised.value.result is result
    assert raised.value.exit_code == result.exit_code


def test_the_error_has_the_report_as_a_note_and_can_be_pickled():
    with pytest.raises(JobFailedError) as raised:
        FAILED.raise_for_failure()
    assert raised.value.__notes__ == [str(FAILED)]
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.result, again.exit_code) == (str(raised.value), FAILED, 3)


# --- notebooks ----------------------------------------------------------------------------------


def test_html_needs_no_other_files_and_its_style_affects_no_other_html(values):
    for value in values:
        html = value._repr_html_()
        assert not re.search(r"<script|<link|@import|url\(|src=|href=", html)
        assert "<b>" not in html
        rules = "".join(style.text for style in drawn(value).iter("style"))
        selectors = re.findall(r"([^{}]+)\{", rules)
        assert all(
            part.strip().startswith((".poprun-py", "@media"))
            for selector in selectors
            for part in selector.split(",")
        ), selectors


def test_the_tables_in_html(job):
    assert rows(ENDED)[1] == ["0", "h", "4", "ended well", "30", ""]
    assert rows(FAILED)[2] == ["1", "h", "5", "exit code 3", "", ""]
    marked = [row.get("class") for row in drawn(FAILED).iter("tr")]
    assert marked == [None, None, "pp-marked"]
    assert [row.get("class") for row in drawn(VIEW).iter("tr")] == [None, None, "pp-marked"]
    assert [bar.get("style") for bar in drawn(VIEW).iter("i")] == ["width:50%", "width:100%"]
    assert ["--env", "TOKEN", "Python"] in rows(CONFIG)
    assert len(list(drawn(job).iter("{http://www.w3.org/2000/svg}svg"))) == 1
    assert len(rows(job)) == 3


@pytest.mark.sweep
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make system-packages")
def test_the_html_of_every_value_fits_on_a_phone(values, tmp_path):
    file = tmp_path / "values.html"
    body = "\n".join(value._repr_html_() for value in values)
    file.write_text(f'<!DOCTYPE html><meta name="viewport" content="width=device-width">{body}')
    with open_browser(tmp_path / "profile") as page:
        page.look(width=390)
        page.open(file)
        assert page.value("document.documentElement.scrollWidth") == 390
        assert page.problems == []
        assert page.requests == [file.as_uri()]
