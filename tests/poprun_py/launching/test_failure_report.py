"""The report of a failed job: tracebacks, excerpts, diagnoses."""

from __future__ import annotations

from datetime import datetime

import pytest

from popdist_py.environment import AUTOMATIC, COMPILING, INFERENCE, RESUME_EXIT_CODE, TRAINING
from poprun_py.display.formatting import iso_time
from poprun_py.launching.failure_report import (
    diagnosis,
    report_text,
    stderr_excerpt,
    traceback_of,
)
from poprun_py.launching.run_folder import ended_attempt
from poprun_py.running.supervise.launch_result import (
    Cause,
    Collective,
    InstanceResult,
    LaunchResult,
    Progress,
    StackGroup,
    describe,
)

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
    first = failed(ended_ns=1_500_000_000, progress=Progress(4), stderr_tail=TRACEBACK)
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
    assert ".500, PID 5, after training step 4" in lines[1]
    assert "  | ValueError: bad" in lines
    assert "poprun-py: instances 0, 2: stopped, signal SIGTERM" in lines
    assert "poprun-py: instance 3: failed later, exit code 1" in lines
    told = ended_attempt(result, label)
    assert told["first_failure"]["traceback"] == TRACEBACK
    assert told["collateral"] == [0, 2, 3]


def test_a_traceback_of_several_instances_is_told_once():
    def instance(index, message, **fields):
        trace = f"Traceback (most recent call last):\n  File x at 0x7f{index}0aa\n{message}"
        host = "ab"[index // 3]
        return failed(index=index, host=host, pid=70 + index, stderr_tail=trace, **fields)

    first = instance(1, "ValueError: rank 1 of PID 71 on a")
    others = (
        instance(0, "ValueError: rank 0 of PID 70 on a", was_stopped=True),
        first,
        instance(2, "ValueError: rank 2 of PID 72 on a"),
        instance(3, "ValueError: rank 3 of PID 73 on b", was_stopped=True),
        instance(4, "KeyError: 4", was_stopped=True),
        instance(5, "", code=-15, was_stopped=True),
    )
    text = report_text(LaunchResult(exit_code=1, instances=others, first_failure=first), label)
    assert text.count("ValueError") == 1
    assert text.splitlines()[-3:] == [
        "poprun-py: instances 0, 2-3 (a, b): failed with the same traceback, exit code 1",
        "poprun-py: instance 4 (b): failed later, exit code 1",
        "poprun-py: instance 5 (b): stopped, signal SIGTERM",
    ]
    alone = LaunchResult(exit_code=1, instances=others[:3], first_failure=first)
    assert "poprun-py: instances 0, 2: failed with the same traceback" in report_text(alone, label)


def test_a_list_of_many_instances_is_short():
    first = failed(index=0)
    others = tuple(
        InstanceResult(index=i, host=f"h{i}", code=-15, was_stopped=True) for i in range(2, 60, 2)
    )
    text = report_text(LaunchResult(exit_code=1, instances=others, first_failure=first), label)
    line = next(line for line in text.splitlines() if "stopped" in line)
    assert "instances 2, 4, 6, 8, 10, 12, 14, 16 and 21 more (h2, h4, " in line
    assert "and 21 more): stopped" in line


@pytest.mark.parametrize(
    ("progress", "place"),
    [
        (Progress(0), "before its first step"),
        (Progress(24), "after training step 24"),
        (Progress(24, doing=TRAINING), "in training step 25"),
        (Progress(24, 3), "after inference call 3 after training step 24"),
        (Progress(24, 2, doing=INFERENCE), "in inference call 3 after training step 24"),
        (Progress(0, 3), "after inference call 3"),
        (Progress(20, resumed=20), "before its first step (resumed from training step 20)"),
        (Progress(20, 0, 20, COMPILING),
         "while compiling, before its first step (resumed from training step 20)"),
        (Progress(24, doing=COMPILING), "while compiling, after training step 24"),
    ],
)  # fmt: skip
def test_place_of_a_failure_or_hang_is_told_in_the_users_steps(progress, place):
    first = failed(progress=progress)
    result = LaunchResult(exit_code=1, instances=(first,), first_failure=first)
    assert report_text(result, label).splitlines()[1].endswith(f", PID 5, {place}")
    told = ended_attempt(result, label)["first_failure"]
    assert (told["training_step"], told["inference_calls"]) == (progress.step, progress.calls)
    assert told["resumed_step"] == (progress.resumed or None)
    hung = LaunchResult(
        exit_code=124,
        instances=(InstanceResult(index=0, host="h", progress=progress),),
        reason="no step for 9.0 s",
        hung=(0,),
    )
    assert report_text(hung, label).splitlines()[0].endswith(f"hangs: no step for 9.0 s, {place}")


@pytest.mark.parametrize(
    ("last", "place", "told"),
    [
        (Collective(12, "all_reduce", True, 14.4), "in all_reduce number 12 for 14 s", 14.4),
        (Collective(12, "all_reduce"), "after its 12th collective (all_reduce)", None),
        (Collective(1, "barrier"), "after its 1st collective (barrier)", None),
        (Collective(42, "gather"), "after its 42nd collective (gather)", None),
        (Collective(103, "gather"), "after its 103rd collective (gather)", None),
        (Collective(113, "gather"), "after its 113th collective (gather)", None),
    ],
)
@pytest.mark.parametrize("progress", [None, Progress(0)])
def test_place_of_a_program_without_steps_is_told_in_collectives(last, place, told, progress):
    first = failed(progress=progress, collective=last)
    result = LaunchResult(exit_code=1, instances=(first,), first_failure=first)
    assert report_text(result, label).splitlines()[1].endswith(f", PID 5, {place}")
    seen = ended_attempt(result, label)["first_failure"]["last_collective"]
    assert seen == {"number": last.number, "name": last.name, "lasting_seconds": told}


@pytest.mark.parametrize(
    ("collective", "place"),
    [
        (None, "after training step 24"),
        (Collective(12, "all_reduce"), "after training step 24"),
        (
            Collective(12, "all_reduce", True, 14.4),
            "after training step 24, in all_reduce number 12 for 14 s",
        ),
    ],
)
def test_place_in_a_plain_loop_is_its_step_and_what_it_does(collective, place):
    progress = Progress(24, doing=AUTOMATIC)
    first = failed(index=0, progress=progress, collective=collective)
    result = LaunchResult(exit_code=1, instances=(first,), first_failure=first)
    assert report_text(result, label).splitlines()[1].endswith(f", PID 5, {place}")
    assert "no_steps" not in ended_attempt(result, label)
    text = 'Thread (most recent call first):\n  File "/home/me/train.py", line 3 in <module>\n'
    hung = LaunchResult(
        exit_code=124, instances=(first,), reason="no step for 9.0 s", hung=(0,),
        stacks=(StackGroup(instances=(0,), text=text),),
    )  # fmt: skip
    line = "" if "number" in place else ", at train.py:3"
    assert report_text(hung, label).splitlines()[0].endswith(f"for 9.0 s, {place}{line}")


def test_place_of_a_hang_without_steps_is_the_line_where_no_collective_tells_it():
    text = 'Thread (most recent call first):\n  File "/home/me/train.py", line 3 in <module>\n'
    hung = LaunchResult(
        exit_code=124,
        instances=(
            InstanceResult(index=0, host="h", collective=Collective(2, "barrier", True, 7.0)),
            InstanceResult(index=1, host="h", collective=Collective(1, "barrier")),
            InstanceResult(index=2, host="h", progress=Progress(0)),
            InstanceResult(index=3, host="h"),
        ),
        reason="silent for 9.0 s (no output, no CPU time)",
        hung=(1, 2, 0, 3),
        stacks=(StackGroup(instances=(0, 1, 2), text=text),),
    )
    ends = [line.partition("CPU time)")[2] for line in report_text(hung, label).splitlines()]
    assert ends[:4] == [
        ", after its 1st collective (barrier), at train.py:3",
        ", at train.py:3",
        ", in barrier number 2 for 7 s",
        "",
    ]


def test_last_words_on_the_screen_are_not_repeated():
    first = failed(stderr_tail=TRACEBACK, had_last_word=True)
    result = LaunchResult(exit_code=1, instances=(first,), first_failure=first)
    assert "Traceback" not in report_text(result, label)


def test_good_end_has_no_report():
    assert report_text(LaunchResult(exit_code=0), label) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"code": -9, "oom_kills": 1, "memory_limit_bytes": 1 << 30}, "limit 1.0 GiB"),
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


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"exit_code": 0}, "completed"),
        ({"exit_code": RESUME_EXIT_CODE, "cause": Cause.SIGNAL}, "checkpoint"),
        ({"exit_code": 3, "cause": Cause.FAILED}, "failed"),
        ({"exit_code": 124, "cause": Cause.HANG, "hung": (1,)}, "hang"),
        ({"exit_code": 124, "cause": Cause.TIME_LIMIT, "timed_out": True}, "time_limit"),
        ({"exit_code": 130, "cause": Cause.SIGNAL}, "signal"),
        ({"exit_code": 137, "cause": Cause.MPIRUN_ENDED}, "mpirun_ended"),
        ({"exit_code": 1}, "failed"),
    ],
)
def test_an_attempt_says_why_it_ended(fields, cause):
    resumed = InstanceResult(index=0, code=0, progress=Progress(25, resumed=20))
    result = LaunchResult(**fields, reason="why", instances=(InstanceResult(index=1), resumed))
    told = ended_attempt(result, label)
    assert (told["cause"], told["reason"]) == (cause, "why")
    assert told["resumed_step"] == 20
    assert [i["training_step"] for i in told["instances"]] == [None, 25]


def test_times_name_their_zone():
    when = datetime.fromisoformat(iso_time(1_500_000_000.25))
    assert when.timestamp() == 1_500_000_000.25
    assert when.tzinfo is not None
