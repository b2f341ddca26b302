"""The subcommand ``poprun-py stop``, which ends running jobs and waits for their end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

import click

from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py.command.click_commands import HELP, parse_words
from poprun_py.command.machine_jobs import MachineJob, find_job, jobs_of_machine
from poprun_py.errors import StartError, TimeLimitError, UsageError
from poprun_py.options.declared_options import OPTIONS
from poprun_py.running.supervise.launcher_end import EndingLauncher, JobEnd
from poprun_py.terminal import command_name, print_error, print_out

# After this many seconds without output, the command prints which job it is waiting for.
_QUIET_SECONDS = 2.0
_HELP: Final = """End running jobs, and wait until all of their processes have ended.

JOB is the name of a run, the folder of a run, or the process id of a launcher. The command
poprun-py jobs lists the running jobs. poprun-py stop has the same effect as SIGTERM to the launcher
of the job. Instances that call stopRequested() save a checkpoint, all at the same training step.
Instances that do not call stopRequested() get SIGTERM. Processes that still run after the job's
--grace are killed. A second poprun-py stop of the same job kills the job at once. If one JOB is not
found, no job is stopped.

\b
Exit codes:
  0    all named jobs have ended
  2    a JOB does not name one of your own jobs, so no job was stopped
  3    a signal cannot be sent to a launcher
  124  a job was still running after --timeout

\b
Examples:
  poprun-py stop lr-3
  poprun-py stop --timeout 2m lr-3 lr-4 4711
"""


def _complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Return the names of this user's jobs that begin with ``begun``, for the shell."""
    names = [job.run_id or str(job.pid) for job in jobs_of_machine() if job.is_own]
    return [name for name in names if name.startswith(begun)]


STOP: Final = click.Command(
    "stop",
    help=_HELP,
    add_help_option=False,
    params=[
        click.Argument(["jobs"], nargs=-1, metavar="JOB...", shell_complete=_complete),
        click.Option(
            ["--timeout"],
            metavar="TIME",
            help="Wait at most this time for the end of the jobs, such as 90s or 5m. The jobs are"
            " not killed after this time. By default, the wait has no limit.",
        ),
        HELP,
    ],
)


def main(words: Sequence[str]) -> int:
    """Run ``poprun-py stop`` with the arguments ``words`` and return the exit code.

    Raises:
        UsageError: An argument is not accepted, or does not name a running job of this user.
        StartError: A launcher cannot be signalled.
        TimeLimitError: A job has not ended in time.
    """
    values = parse_words(STOP, words)
    if values is None:
        return 0
    names, seconds = values["jobs"], values["timeout"]
    if not names:
        raise UsageError(
            f"stop needs the name of a run or the process id of a launcher; {command_name()} jobs "
            "lists the names and process ids"
        )
    timeout = None if seconds is None else OPTIONS["timeout"].read("--timeout", seconds)
    known = jobs_of_machine()
    # All names are looked up before the first job is stopped.
    jobs = list({(job := find_job(name, known)).pid: job for name in names}.values())
    stop_jobs(jobs, timeout)
    return 0


def stop_jobs(jobs: Sequence[MachineJob], timeout: float | None) -> None:
    """Ask all jobs to end, wait for their ends, and print a line about each end.

    Raises:
        StartError: A launcher cannot be signalled.
        TimeLimitError: A job has not ended after ``timeout`` seconds.
    """
    began = time.monotonic()
    late = []
    with contextlib.ExitStack() as opened:
        launchers = []
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):  # the job has ended by itself
                launcher = EndingLauncher(job.pid, job.socket, job.start_ticks)
                launchers.append((job, opened.enter_context(launcher)))
                continue
            print_out(f"{job.title} had already ended")
        for job, launcher in launchers:
            try:
                with contextlib.suppress(ProcessLookupError):
                    launcher.end()
            except OSError as error:
                raise StartError(
                    f"{job.title} cannot be stopped, because no signal can be sent to its launcher "
                    f"({error.strerror})"
                ) from None
        for job, launcher in launchers:
            if _has_ended(job, launcher, began, timeout):
                print_out(end_text(job, launcher.told_end(), time.monotonic() - began))
            else:
                late.append(job.title)
    if late:
        raise TimeLimitError(
            f"these jobs are still running after --timeout {timeout:g} s: {', '.join(late)}; "
            "--status shows the instances of a job, and a second stop kills the job"
        )


def _has_ended(
    job: MachineJob, launcher: EndingLauncher, began: float, timeout: float | None
) -> bool:
    """Wait for the end of a launcher; return whether it has ended within ``timeout`` seconds."""
    quiet = _QUIET_SECONDS if timeout is None else min(_QUIET_SECONDS, timeout)
    if launcher.wait(began + quiet - time.monotonic()):
        return True
    if timeout is None or timeout > _QUIET_SECONDS:
        print_error(f"{command_name()}: waiting for the end of {job.title}")
    return launcher.wait(None if timeout is None else began + timeout - time.monotonic())


def end_text(job: MachineJob, end: JobEnd, seconds: float) -> str:
    """Return the line about a job that has ended after ``seconds``."""
    line = f"{job.title} ended after {seconds:.1f} s"
    if job.socket is None:
        return f"{line}: it was not running a program"
    if end.exit_code is None:
        return line
    reason = f": {end.reason}" if end.reason else ""
    if end.exit_code == RESUME_EXIT_CODE:
        reason = " at a checkpoint; start the job again to resume from this checkpoint"
    return f"{line} with exit code {end.exit_code}{reason}"
