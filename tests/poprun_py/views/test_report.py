"""The report of a failed job: tracebacks, excerpts, diagnoses."""

from __future__ import annotations

import pytest

from poprun_py.supervision.job import InstanceResult, LaunchResult, describe
from poprun_py.views.report import diagnosis, report_json, report_text, stderr_excerpt, traceback_of

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    g()
ValueError: bad"""


def label(index):
    return f"instance {index} (replica {index})"


def failed(**fields):
    return InstanceResult(**{"index": 1, "host": "h", "pid": 5, "code": 1, **fields})


def test_traceback_is_taken_out_of_other_words():
    stderr = f"warming up\n{TRACEBACK}\n\nsome thread still says this\n"
    assert traceback_of(stderr) == TRACEBACK
    assert traceback_of("nothing here") == ""


def test_excerpt_is_the_whole_traceback_or_the_last_lines():
    assert stderr_excerpt("\n".join(map(str, range(50))))[0] == "30"
    long = "Traceback (most recent call last):\n" + "  File x\n" * 40 + "ValueError: bad\n"
    assert stderr_excerpt("before\n" + long)[0] == "Traceback (most recent call last):"
    assert stderr_excerpt("\r 10%\r 20%\n") == [" 20%"]


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 9, in <module>
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in f
    | ValueError: one
    +------------------------------------"""
NOT_PYTHON = """  File "a.py", line 3
    a = (
        ^
SyntaxError: '(' was never closed"""


@pytest.mark.parametrize("trace", [GROUP, NOT_PYTHON], ids=["group", "syntax"])
def test_tracebacks_of_other_kinds(trace):
    noise = "".join(f"before {number}\n" for number in range(30))
    assert traceback_of(noise + trace + "\n") == trace
    assert stderr_excerpt(noise + trace + "\n")[-len(trace.splitlines()) :] == trace.splitlines()


def test_excerpt_begins_with_what_led_to_the_failure():
    cause = "Traceback (most recent call last):\n" + "  File x\n" * 20 + "KeyError: 'x'\n"
    effect = "Traceback (most recent call last):\n" + "  File y\n" * 20 + "ValueError: bad\n"
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert "KeyError: 'x'" in stderr_excerpt(cause + link + effect)


def test_report_names_the_first_and_lists_the_others_apart():
    first = failed(ended_ns=1_500_000_000, step=4, stderr_tail=TRACEBACK)
    others = (
        InstanceResult(index=0, code=-15, was_stopped=True),
        first,
        InstanceResult(index=2, code=-15, was_stopped=True),
        InstanceResult(index=3, code=1, was_stopped=True),
    )
    result = LaunchResult(exit_code=1, instances=others, first_failure=first)
    text = report_text(result, label)
    lines = text.splitlines()
    assert lines[0] == "poprun-py: instance 1 (replica 1) on h failed first: exit code 1"
    assert ".500, PID 5, after step 4" in lines[1]
    assert "  | ValueError: bad" in lines
    assert "poprun-py: instances 0, 2: stopped, signal SIGTERM" in lines
    assert "poprun-py: instance 3: failed after it, exit code 1" in lines
    assert report_json(result, label)["first_failure"]["traceback"] == TRACEBACK
    assert report_json(result, label)["collateral"] == [0, 2, 3]


def test_last_words_on_the_screen_are_not_repeated():
    first = failed(stderr_tail=TRACEBACK, had_last_word=True)
    result = LaunchResult(exit_code=1, instances=(first,), first_failure=first)
    assert "Traceback" not in report_text(result, label)


def test_good_end_has_no_report():
    assert report_text(LaunchResult(exit_code=0), label) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"code": -9, "oom_kills": 1, "memory_limit_bytes": 1 << 30}, "of 1.0 GiB allowed"),
        ({"code": -9, "max_rss_bytes": 5 << 20}, "killed from outside"),
        ({"code": -9, "was_lost": True}, "vanished"),
        ({"stderr_tail": "Traceback (most recent call last):\nMemoryError"}, "out of memory"),
        ({"code": 3}, ""),
    ],
)
def test_diagnosis(fields, words):
    found = diagnosis(failed(**fields))
    assert words in found
    assert bool(words) == bool(found)


def test_ends_are_described_by_name():
    assert [describe(c) for c in (3, -11, -64)] == [
        "exit code 3",
        "signal SIGSEGV",
        "signal SIGRTMAX",
    ]
    assert InstanceResult(index=0, code=-11).exit_code == 139
