"""What a launcher's process does with its order: plan, run, and say on the way what goes on."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from poprun_py.errors import LaunchError, StartError
from poprun_py.launching import launch_planning, launcher
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.python_api.messages import Attempt, Channel, Order
from poprun_py.running.supervise.job import Cause, Job, LaunchResult
from poprun_py.terminal import Terminal

_WAITED = re.compile(r"^waiting \d+ s ")


def run_order(order: Order, channel: Channel) -> tuple[str, object]:
    """Run the job of an order to its end; returns the last message about it."""
    try:
        return "result", _run(order, channel)
    except LaunchError as error:
        return "error", error
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return "error", StartError(what)
    except Exception as error:
        return "error", StartError(f"the launcher failed: {type(error).__name__}: {error}")


def stopped_result(number: signal.Signals) -> LaunchResult:
    """Return the end of a job that a signal ended before its programs ran."""
    return LaunchResult(
        exit_code=128 + number,
        reason=f"{number.name} received before the programs ran",
        cause=Cause.SIGNAL,
    )


def _run(order: Order, channel: Channel) -> LaunchResult:
    job = order.job
    config = job.config if isinstance(job, LaunchPlan) else job
    console = _Console(order.listeners, channel, is_verbose=config.verbosity >= 1)
    progress = _progress(console, channel)
    held = None
    if isinstance(job, LaunchPlan):
        planned = job if order.environ is None else replace(job, environ=order.environ)
    else:
        planned, held = launch_planning.plan_leased(
            job, console, environ=order.environ, progress=progress
        )
    gc.enable()
    return launcher.run(
        planned,
        console,
        held=held,
        progress=progress,
        output_folder=order.folder if order.keeps_output else None,
        begins=lambda attempt: channel.send("attempt", _attempt(attempt)),
    )


def _attempt(job: Job) -> Attempt:
    folder = job.output_dir
    return Attempt(
        run_id=job.run_id,
        num_instances=len(job.variables),
        folder=None if folder is None else str(Path(folder).absolute()),
    )


def _progress(console: Terminal, channel: Channel) -> Callable[[str], None]:
    """Return what takes whom the job waits for; a terminal shows it too, else what is new is told.

    The text begins with how long it has waited, which is new every time.
    """
    show, told = console.progress, ""

    def tell(text: str) -> None:
        nonlocal told
        whom = _WAITED.sub("", text)
        channel.send("waiting", whom)
        if show is not None:
            show(text)
        elif whom and whom != told:
            console.tell(f"waiting {whom}")
        told = whom

    return tell


class _Console(Terminal):
    """Prints what the command would print, and sends what somebody asked to be told."""

    def __init__(self, listeners: frozenset[str], channel: Channel, *, is_verbose: bool) -> None:
        super().__init__(is_verbose=is_verbose, prints_bindings=False)
        self._listeners = listeners
        self._channel = channel

    def log(self, line: str) -> None:
        if "log" in self._listeners:
            self._channel.send("log", line)
        else:
            super().log(line)

    def warn(self, sentence: str) -> None:
        if "warn" in self._listeners:
            self._channel.send("warn", sentence)
        else:
            super().warn(sentence)

    def binding(self, line: str) -> None:
        if "binding" in self._listeners:
            self._channel.send("binding", line)
        else:
            self.log(line)
