"""Rows about processes: killed, stopped, or stopped for a while in every phase, or ended by itself.

Signals to the launcher that ask it to end belong here as well.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from dataclasses import replace

from tools.soak.faults import fail_at
from tools.soak.jobs import Job
from tools.soak.program import FAULT, PHASES, STEPS
from tools.soak.rows import POPTORCH, Act, Done, Expected, Prepare, Row

HANG_SECONDS = 2
HANG_OPTIONS = ("--hang-timeout", str(HANG_SECONDS), "--grace", "1")
# The first step may take thirty seconds; the time limit is sooner.
LIMIT_SECONDS = 10
# From the start of a process on: most of what it does before its program runs.
_START_SECONDS, _START_SECONDS_OF_HOSTS = 0.3, 1.0
# Within a phase: a step, a save, or the way from the last step to the end.
_DELAY_SECONDS = {"checkpoint": 0.012, "end": 0.15}
_USUAL_DELAY_SECONDS = 0.03
TIMES_OF_PHASE = {"training": 18, "checkpoint": 5, "validation": 2}


def reach(job: Job, dice: random.Random, kind: str, phase: str, instance: int) -> int | None:
    """Wait for a drawn moment of a phase and return a process of ``kind``; None if it is gone."""
    time_of_phase = dice.randint(1, TIMES_OF_PHASE.get(phase, 1))
    share = dice.random()
    if phase == "start":
        delay = _START_SECONDS if job.place.num_instances == 2 else _START_SECONDS_OF_HOSTS
    else:
        delay = _DELAY_SECONDS.get(phase, _USUAL_DELAY_SECONDS)
        job.wait_for(lambda: job.noted(instance).count(phase) >= time_of_phase)
    if not job.wait_for(lambda: job.find(kind, instance)):
        return None
    time.sleep(share * delay)
    return job.find(kind, instance)


def _draw(job: Job, dice: random.Random, kind: str, phases: tuple[str, ...]) -> tuple[str, int]:
    first = 1 if kind in ("daemon", "ssh") else 0  # the launcher's own host needs none
    return dice.choice(phases), dice.randrange(first, job.place.num_instances)


def send(kind: str, number: int, phases: tuple[str, ...] = PHASES) -> Act:
    """Send a signal to a process of ``kind``."""

    def act(job: Job, dice: random.Random) -> Done:
        phase, instance = _draw(job, dice, kind, phases)
        pid = reach(job, dice, kind, phase, instance)
        seen = job.phase(instance)
        missed = pid is None or not job.send(number, pid)
        return Done(at=time.monotonic(), phase=seen, instance=instance, missed=missed)

    return act


def pause(kind: str, phases: tuple[str, ...] = PHASES) -> Act:
    """Stop a process of ``kind`` for less than the hang timeout."""

    def act(job: Job, dice: random.Random) -> Done:
        phase, instance = _draw(job, dice, kind, phases)
        seconds = dice.uniform(0.05, HANG_SECONDS / 2)
        pid = reach(job, dice, kind, phase, instance)
        seen = job.phase(instance)
        missed = pid is None or not job.send(signal.SIGSTOP, pid)
        if not missed:
            time.sleep(seconds)
            job.send(signal.SIGCONT, pid)
            with contextlib.suppress(ProcessLookupError):
                # In front of a launcher on another host stands what stops and goes on with it.
                job.process.send_signal(signal.SIGCONT)
        return Done(
            at=time.monotonic(),
            phase=seen,
            instance=instance,
            missed=missed,
            what=f"{seconds:.2f} s",
        )

    return act


def drawn_failure(how: str) -> Prepare:
    """Have an instance fail by itself at a step; both are drawn."""

    def prepare(job: Job, dice: random.Random) -> dict[str, str]:
        return fail_at(dice.randrange(job.place.num_instances), dice.randrange(STEPS), how)

    return prepare


def await_failure(job: Job, dice: random.Random) -> Done:
    """Wait until an instance fails as ``drawn_failure`` said."""

    def failing() -> list[int]:
        return [i for i in range(job.place.num_instances) if FAULT in job.noted(i)]

    job.wait_for(failing)
    instance = next(iter(failing()), None)
    return Done(at=time.monotonic(), phase="training", instance=instance, missed=instance is None)


NAMES = {
    "launcher": "the launcher", "mpirun": "`mpirun`", "daemon": "a daemon of `mpirun`",
    "ssh": "`ssh`", "wrapper": "a wrapper", "program": "a program",
    "worker": "a data-loader worker",
}  # fmt: skip
KILLED_FIRST = "failed first: signal SIGKILL"
MPIRUN_KILLED = "mpirun ended with signal SIGKILL"
_STARTED = "(0|1|2|3) of (2|4) instances started|never reported|does not answer"
_WORKER = "the data-loader worker has ended"
GOES_ON = Expected(codes=(0,), seconds=20)


def or_done(expected: Expected) -> Expected:
    """Return what has to follow where the job may have been done already."""
    return replace(expected, codes=(*expected.codes, 0), names=False, says="")


def after_kill(seconds: float) -> dict[str, tuple[Expected, dict[str, Expected]]]:
    """Return what follows SIGKILL of each kind of process, and its exceptions by phase."""
    mpirun = Expected(codes=(137,), seconds=seconds, says=MPIRUN_KILLED)
    own = Expected(codes=(137,), seconds=seconds, names=True, says=KILLED_FIRST)
    worker = Expected(codes=(1,), seconds=seconds, names=True, says=_WORKER)
    unstarted = Expected(
        codes=(3, 137), seconds=seconds, says=f"{_STARTED}|{KILLED_FIRST}|{MPIRUN_KILLED}"
    )
    return {
        "launcher": (Expected(codes=(-9,), seconds=seconds), {}),
        "mpirun": (mpirun, {"start": unstarted, "end": or_done(mpirun)}),
        "wrapper": (own, {"start": unstarted, "end": or_done(own)}),
        "program": (own, {"end": or_done(own)}),
        "worker": (worker, {"end": or_done(worker)}),
    }


def after_stop(seconds: float) -> dict[str, tuple[Expected, dict[str, Expected]]]:
    """Return what follows SIGSTOP of each kind of process, and its exceptions by phase."""
    hang = Expected(codes=(124,), seconds=seconds, names=True, says="hangs: no training step for")
    late = replace(
        hang, seconds=LIMIT_SECONDS + seconds, says="hangs: no training step for|time limit"
    )
    limit = replace(late, names=False)
    early = {"start": limit, "compile": limit, "end": or_done(hang)}
    # Programs that run need it only to leave MPI.
    mpirun = replace(
        hang, names=False, says="hangs: no training step for .* while mpirun .* is stopped"
    )
    return {
        "mpirun": (mpirun, {"start": limit, "compile": limit, "end": or_done(mpirun)}),
        # Nobody may have heard yet that its program makes steps.
        "wrapper": (late, early),
        "program": (hang, early),
        "worker": (hang, early),
    }


# How a program fails by itself: the code, and what the report says.
_FAILURES = {
    "exit": (3, "exit code 3"), "os_exit": (9, "exit code 9"), "segv": (139, "SIGSEGV"),
    "exception": (1, "ValueError: the loss is not a number"), "abort": (134, "SIGABRT"),
    "memory_error": (1, "out of memory: an allocation failed"), "term": (143, "SIGTERM"),
}  # fmt: skip
_REQUESTS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def rows() -> tuple[Row, ...]:
    """Return the rows of one host."""
    return (*_signal_rows(), *_own_failures(), *_model_rows())


def _signal_rows() -> list[Row]:
    found = [
        Row(title=f"SIGKILL of {NAMES[kind]}", act=send(kind, signal.SIGKILL), expected=expected,
            by_phase=by_phase, weight=10)
        for kind, (expected, by_phase) in after_kill(2).items()
    ]  # fmt: skip
    found += [
        Row(title=f"SIGSTOP of {NAMES[kind]}", act=send(kind, signal.SIGSTOP), expected=expected,
            by_phase=by_phase, options=(*HANG_OPTIONS, "--timeout", str(LIMIT_SECONDS)), weight=5)
        for kind, (expected, by_phase) in after_stop(7).items()
    ]  # fmt: skip
    found += [
        Row(title=f"SIGSTOP of {NAMES[kind]}, then SIGCONT", act=pause(kind), expected=GOES_ON,
            weight=5, options=HANG_OPTIONS)
        for kind in ("launcher", "mpirun", "wrapper", "program", "worker")
    ]  # fmt: skip
    for number, code in _REQUESTS.items():
        # A program that waits in MPI does not notice SIGINT, and is killed after the grace time.
        expected = Expected(codes=(code,), seconds=7 if number == signal.SIGINT else 2)
        found.append(
            Row(title=f"{number.name} to the launcher", act=send("launcher", number), weight=5,
                expected=expected,
                # Python is killed by a signal that comes before it can catch any; interrupted while
                # it finds its own modules, before any line of the launcher, it ends with 1.
                by_phase={"start": replace(expected, codes=(code, -number)
                                           + (1,) * (number == signal.SIGINT)),
                          "end": or_done(expected)})
        )  # fmt: skip
    return found


def _own_failures() -> list[Row]:
    return [
        Row(title=f"a program ends by itself: {says}", act=await_failure,
            expected=Expected(codes=(code,), seconds=2, names=True, says=says),
            prepare=drawn_failure(how), weight=3)
        for how, (code, says) in _FAILURES.items()
    ]  # fmt: skip


def _model_rows() -> list[Row]:
    """Return those of a PopTorch model, which cost much more."""
    phases = ("compile", "training", "checkpoint")
    worker = Expected(codes=(1,), seconds=3, names=True, says="DataLoader worker")
    expected = {kind: after_kill(3)[kind][0] for kind in ("launcher", "program")} | {
        "worker": worker
    }
    return [
        Row(title=f"SIGKILL of {NAMES[kind]}, a PopTorch model", program=POPTORCH,
            act=send(kind, signal.SIGKILL, phases), expected=each)
        for kind, each in expected.items()
    ]  # fmt: skip
