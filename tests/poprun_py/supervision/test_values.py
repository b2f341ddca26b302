"""The pure parts of supervision: agreements, hangs, stacks, reports, restarts."""

from __future__ import annotations

import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.agreement import Move, StopAgreement
from poprun_py.control import Peer
from poprun_py.errors import StartError
from poprun_py.hangs import HangWatch
from poprun_py.job import InstanceResult, Job, LaunchResult, describe
from poprun_py.outcome import Ending, judge
from poprun_py.output import make_stream
from poprun_py.report import diagnosis, report_json, report_text, stderr_excerpt, traceback_of
from poprun_py.restart import backoff_seconds, lost_hosts, pause, pause_within, run_with_restarts
from poprun_py.stacks import group_stacks, missing_instances, render_groups


class Instance:
    """A program that asks whether to stop, as ``popdist_py.heartbeat`` does."""

    def __init__(self):
        self.polls = self.proposed = self.agreed = 0
        self.stopped_at = None

    def run(self, calls):
        """Ask up to ``calls`` times; stands still where it has to wait for the agreement."""
        for _ in range(calls):
            if self.stopped_at is not None or self.waits():
                return
            self.polls += 1
            self.look()

    def waits(self):
        return 0 < self.proposed <= self.polls and self.agreed != self.proposed

    def look(self):
        if 0 < self.proposed <= self.polls and self.agreed == self.proposed:
            self.stopped_at = self.polls


@given(st.integers(1, 5), st.randoms(use_true_random=False))
def test_all_stop_at_the_same_question_whatever_the_timing(count, dice):
    instances = [Instance() for _ in range(count)]
    for instance in instances:
        instance.run(dice.randrange(20) + 1)
    agreement = StopAgreement(range(count))
    messages = [(i, 0) for i in range(count)]  # proposals on the way to the instances
    answers: list[tuple[int, int, int]] = []
    while not agreement.agreed:
        dice.choice(instances).run(dice.randrange(8))
        if messages and dice.random() < 0.5:
            index, proposal = messages.pop(dice.randrange(len(messages)))
            instances[index].proposed = proposal or instances[index].proposed
            answers.append((index, proposal, instances[index].polls))
        elif answers:
            move = agreement.answer(*answers.pop(dice.randrange(len(answers))))
            if move is Move.PROPOSE:
                messages += [(i, agreement.proposal) for i in range(count)]
            assert move is not Move.NOBODY
    for instance in instances:
        instance.agreed = agreement.proposal
        instance.look()
        instance.run(10_000)
    assert {instance.stopped_at for instance in instances} == {agreement.proposal}


def test_programs_that_never_ask_are_not_waited_for():
    agreement = StopAgreement([0, 1])
    assert agreement.answer(0, 0, 0) is None
    assert agreement.answer(1, 0, 0) is Move.NOBODY


def test_instance_that_ends_leaves_the_agreement_to_the_others():
    agreement = StopAgreement([0, 1])
    agreement.answer(0, 0, 7)
    assert agreement.leave(1) is Move.PROPOSE
    assert agreement.proposal > 7
    assert agreement.answer(0, agreement.proposal, 8) is Move.AGREE


def test_late_answer_to_an_old_proposal_is_ignored():
    agreement = StopAgreement([0])
    agreement.answer(0, 0, 5)
    assert agreement.answer(0, 0, 6) is None


# --- hangs ------------------------------------------------------------------------------------


def test_hang_with_a_fixed_limit():
    watch = HangWatch(2.0)
    watch.beat(0, 0, now=0.0)
    assert watch.hung(19.0) == ()  # joining and compiling may take longer
    assert watch.hung(31.0) == (0,)
    watch.beat(0, 1, now=20.0)
    watch.beat(1, 1, now=21.0)
    assert watch.hung(21.9) == ()
    assert watch.hung(22.5) == (0,)
    assert watch.hung(23.5) == (0, 1)
    watch.ended(0)
    assert watch.hung(23.5) == (1,)


def test_automatic_limit_follows_the_median_step():
    watch = HangWatch("auto")
    for step in range(20):
        watch.beat(0, step, now=2.0 * step)
    assert watch.limit == pytest.approx(40.0)
    assert watch.hung(38 + 39.0) == ()
    assert watch.hung(38 + 41.0) == (0,)


def test_automatic_limit_waits_for_a_few_steps_and_has_a_floor():
    watch = HangWatch("auto")
    watch.beat(0, 1, now=0.0)
    assert watch.limit is None
    for step in range(2, 20):
        watch.beat(0, step, now=0.001 * step)
    assert watch.limit == 10.0


def test_silence_that_nobody_could_hear_does_not_count():
    watch = HangWatch(2.0)
    watch.beat(0, 1, now=0.0)
    watch.excuse(now=10.0)
    assert watch.hung(11.9) == ()
    assert watch.hung(12.1) == (0,)
    assert watch.steps() == {0: 1}


def test_programs_that_count_no_steps_are_left_alone():
    assert HangWatch(0.1).hung(1e9) == ()


# --- stacks -----------------------------------------------------------------------------------

WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/site/popdist_py/collectives/api.py", line 99999 in barrier
  File "/home/me/train.py", line 99999 in <module>
"""
LOADING = """Current thread 0x00007f0000000003 (most recent call first):
  File "/home/me/data.py", line 99999 in read
  File "/home/me/train.py", line 99999 in <module>
"""


def process(text, state="S"):
    return [{"pid": 1, "state": state, "text": text}]


@pytest.mark.parametrize(
    ("line", "waits"),
    [("comm.Barrier()", True), ("MPI.Request.Waitall(sent)", True), ("os.waitpid(pid, 0)", False)],
)
def test_line_tells_who_waits_for_other_instances(tmp_path, line, waits):
    source = tmp_path / "train.py"
    source.write_text(line + "\n")
    text = f'Thread 0x01 (most recent call first):\n  File "{source}", line 1 in <module>\n'
    assert group_stacks({0: process(text)})[0].waits is waits


def test_equal_stacks_are_one_group_and_the_odd_one_comes_first():
    other = WAITING.replace("0x00007f0000000002", "0x00007f00000000aa")
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(other)})
    assert [(g.instances, g.waits) for g in groups] == [((1,), False), ((0, 2), True)]
    text = render_groups(groups)
    assert text.startswith("instance 1 (1):\n  thread (most recent call first):\n")
    assert "instances 0,2 (2), waiting for others:" in text
    assert "0x" not in text


def test_the_one_that_does_not_wait_is_missing():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING)})
    assert missing_instances((0, 1), {0: 7, 1: 7}, groups) == (1,)


def test_the_one_that_does_not_wait_is_missing_though_its_last_step_was_later():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(WAITING)})
    assert missing_instances((0,), {0: 7, 1: 7, 2: 7}, groups) == (1,)
    assert missing_instances((1,), {0: 7, 1: 7, 2: 7}, groups) == (1,)


def test_the_one_that_gives_no_stack_is_missing():
    groups = group_stacks({0: process(WAITING), 1: process("", state="T")})
    assert missing_instances((0, 1), {0: 7, 1: 7}, groups) == (1,)
    assert "the process is stopped" in render_groups(groups)


def test_the_slowest_is_missing_if_all_wait():
    groups = group_stacks({0: process(WAITING), 1: process(WAITING)})
    assert missing_instances((0, 1), {0: 8, 1: 7}, groups) == (1,)


def test_wrapper_that_does_not_answer_is_named():
    groups = group_stacks({0: process(WAITING), 1: None})
    assert groups[0].instances == (1,)
    assert "no answer" in groups[0].text


# --- reports ----------------------------------------------------------------------------------

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


# --- results ----------------------------------------------------------------------------------


def peer(index, code, at, offset=0, stopped=False):
    stream = make_stream(index, "stdout")
    return Peer(
        index=index, channel=None, host="h", pid=1, stdout=stream, stderr=stream,
        clock_offset_ns=offset, outcome={"code": code, "time_ns": at, "stopped": stopped},
    )  # fmt: skip


def judged(*peers, **fields):
    job = Job(command=("mpirun",), variables=({},) * len(peers), environ={})
    seen = {
        "job": job, "peers": {p.index: p for p in peers}, "last_word": None, "seconds": 1.0,
        "reason": "", "ended_by": 0, "timed_out": False, "hung": (), "stacks": (),
        "mpirun_code": 0, "mpirun_text": "",
    }  # fmt: skip
    return judge(Ending(**{**seen, **fields}))


def test_a_job_that_was_kept_from_starting_has_no_other_result():
    with pytest.raises(StartError, match=r"^host b: it does not answer$"):
        judged(peer(0, 1, at=1), refusal="host b: it does not answer")


def test_first_is_who_ended_first_by_this_hosts_clock():
    result = judged(peer(0, 1, at=100), peer(1, -9, at=50), peer(2, 3, at=10, offset=80))
    assert (result.exit_code, result.first_failure.index) == (137, 1)
    assert result.may_restart


def test_stopped_instances_did_not_fail():
    result = judged(peer(0, -15, at=1, stopped=True), peer(1, 3, at=2))
    assert (result.exit_code, result.first_failure.index) == (3, 1)


@pytest.mark.parametrize(
    ("peers", "fields", "code"),
    [
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {}, 0),
        ((peer(0, 75, at=1), peer(1, 0, at=1)), {"ended_by": 15}, 75),
        ((peer(0, 75, at=1), peer(1, 3, at=2)), {}, 3),
        ((peer(0, 0, at=1), peer(1, 0, at=1)), {"ended_by": 15}, 143),
        ((peer(0, -15, at=1, stopped=True),), {"timed_out": True}, 124),
        ((peer(0, -15, at=1, stopped=True),), {"hung": (0,)}, 124),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": -9}, 137),
        ((peer(0, -15, at=1, stopped=True),), {"mpirun_code": 0}, 1),
    ],
)
def test_exit_code(peers, fields, code):
    assert judged(*peers, **fields).exit_code == code


def test_instances_that_never_came_are_a_launch_that_could_not_start():
    job = Job(command=("mpirun",), variables=({}, {}), environ={})
    with pytest.raises(StartError, match="1 of 2 instances started, then mpirun ended with exit"):
        judged(peer(0, 0, at=1), job=job, mpirun_code=1)


# --- restarts ---------------------------------------------------------------------------------


def test_job_is_run_again_with_growing_pauses():
    runs, pauses = [], []

    def run(count):
        runs.append(count)
        return LaunchResult(exit_code=count < 3, may_restart=count < 3)

    result = run_with_restarts(run, 5, lambda *_: None, pauses.append)
    assert (runs, pauses) == ([0, 1, 2, 3], [1.0, 2.0, 4.0])
    assert (result.exit_code, result.restart_count) == (0, 3)


def test_restarts_are_used_up():
    result = run_with_restarts(
        lambda _: LaunchResult(exit_code=7, may_restart=True),
        2,
        lambda *_: None,
        lambda _: None,
    )
    assert (result.exit_code, result.restart_count) == (7, 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_signal_between_two_runs_ends_the_job(number, code):
    result = run_with_restarts(
        lambda _: LaunchResult(exit_code=7, hung=(1,), may_restart=True),
        2,
        lambda *_: None,
        lambda _: number,
    )
    assert (result.exit_code, result.hung, result.restart_count) == (code, (), 0)
    assert result.reason == f"{number.name} received before restart 1"


def test_pause_tells_of_the_signal_that_ended_it():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.pthread_kill(threading.get_ident(), number)
        assert pause(20) == signal.SIGTERM
        assert not signal.sigpending() & {signal.SIGTERM, signal.SIGUSR2}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert pause(0.001) == 0
    assert pause_within(0.001)(1000) == 0


def test_pause_has_an_end():
    assert backoff_seconds(1000) == 60.0


def test_host_is_lost_when_all_its_instances_vanished():
    instances = (
        InstanceResult(index=0, code=-15),
        InstanceResult(index=1, code=-9, was_lost=True),
        InstanceResult(index=2, code=-9, was_lost=True),
        InstanceResult(index=3),
    )
    result = LaunchResult(exit_code=137, instances=instances)
    assert lost_hosts(result, lambda index: "ab"[index // 2]) == {"b"}
