"""Start, supervision and end of mpirun, which starts the wrappers of the instances."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from poprun_py import process_info
from poprun_py.errors import PROCESSES_ADVICE, StartError
from poprun_py.instance import process_control, program_environment
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import describe

_CHUNK = 1 << 16
# mpirun is killed this many seconds after it was asked to end. mpirun has no data to save.
_GRACE_SECONDS = 2.0
# The number of files that mpirun opens for itself, and the number of files that mpirun opens for
# each instance on this host and for each other host.
_FILES, _FILES_PER_CHILD = 32, 4
# The maximum seconds for killing processes that mpirun has left running. The search for such
# processes is repeated until it finds none.
_KILL_SECONDS = 2.0
# The shortest and the longest interval between two searches for listening ports of mpirun. mpirun
# listens some 20 ms after its start, and other hosts connect some 100 ms later.
_FIRST_PORTS_SECONDS, _MAX_PORTS_SECONDS = 0.01, 0.25
# Users and schedulers end processes by these signals. mpirun blocks these signals, so that the
# launcher decides how each signal affects the job.
_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)
# The seconds between two checks whether mpirun has received a signal, and the seconds before a
# second check confirms the signal.
_SIGNALS_SECONDS, _SIGNALS_AGAIN_SECONDS = 0.25, 0.05


def mpirun_open_files(job: Job, limits: tuple[int, int]) -> tuple[int, int]:
    """Return a (soft, hard) limit of open files that lets mpirun start its instances.

    If the limit is too low, mpirun kills instances that it has begun to start, and gives no reason.
    ``limits`` is the user's limit, before the launcher raised its own soft limit.

    Raises:
        StartError: The hard limit is too low.
    """
    soft, hard = (math.inf if limit < 0 else limit for limit in limits)
    total = job.num_instances
    children = total
    if job.hosts.listen is not None:
        children = job.hosts.names.count(socket.gethostname()) + len(set(job.hosts.names))
    files_per_peer = 1 if job.files.output_dir is None else 3
    wanted = _FILES + max(_FILES_PER_CHILD * children, files_per_peer * total)
    if hard < wanted:
        raise StartError(
            f"{total} instance{'s need' if total > 1 else ' needs'} {wanted} open files, and the "
            f"hard limit is {hard}: raise the limit (ulimit -n {wanted} as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    return (wanted, limits[1]) if soft < wanted else limits


def daemon_log_lines(host: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield log lines that describe how a wrapper handled its MPI daemon's sockets."""
    for port in report.get("daemon_ports", ()):
        yield f"port {port} of the MPI daemon of host {host} listens only on the job's network"
    if problem := report.get("daemon_problem"):
        yield (
            f"the MPI daemon of host {host} listens on every address of that host: the system does "
            f"not let the first instance on that host change the daemon's sockets ({problem})"
        )


class Mpirun:
    """A running mpirun.

    Args:
        mark: Text in the environment that identifies all processes of the job.
        selector: The selector that reports when mpirun has written output.
        open_files: The (soft, hard) limit of open files for mpirun, inherited by this host's
            instances.
        on_signal: Called with a signal that was sent to mpirun and that mpirun blocks. Without the
            block, mpirun would kill the wrappers within half a second, despite ``--grace``.

    Attributes:
        ended_at: The time when mpirun ended; None before.
        is_expected_to_end: Whether all instances have ended, so that mpirun has nothing left to do.
        end_by: The time by which mpirun and all wrappers have to end; infinity before
            ``expect_end`` is called.

    Raises:
        StartError: The command of mpirun cannot be run.
    """

    def __init__(
        self,
        job: Job,
        environ: Mapping[str, str],
        mark: str,
        selector: selectors.BaseSelector,
        log: Callable[[str], None],
        open_files: tuple[int, int],
        on_signal: Callable[[int], None],
    ) -> None:
        command, self._end_signal = job.command.words, job.command.end_signal
        self._network = job.hosts.network
        self.ended_at: float | None = None
        self.is_expected_to_end = False
        self.end_by = math.inf
        self._on_signal = on_signal
        self._blocked = tuple(number for number in _BLOCKED_SIGNALS if number != self._end_signal)
        self._check_signals_at, self._pending_signal = 0.0, 0
        self._mark = os.fsencode(mark)
        self._selector = selector
        self._log = log
        self._output = bytearray()
        self._was_asked_to_end = False
        self._kill_at = math.inf
        parent = os.getpid()

        def prepare() -> None:
            # If the launcher ends first, this signal makes mpirun end its daemons. After a SIGKILL,
            # MPICH would kill the wrappers before they can clean up.
            process_control.die_with_parent(parent, self._end_signal)
            # A blocked signal stays pending, whatever handler mpirun installs for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
            process_control.set_open_files(open_files)

        try:
            self._process = subprocess.Popen(
                command,
                # If mpirun inherited the launcher's stdin, Open MPI 5 would never tell instance 0
                # that this input has ended.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                # Only the launcher handles Ctrl-C, so the terminal must not send SIGINT to mpirun.
                start_new_session=True,
                preexec_fn=prepare,  # preexec_fn is safe with one thread
            )
        except OSError as error:
            advice = f": {PROCESSES_ADVICE}" if error.errno == errno.EAGAIN else ""
            raise StartError(f"cannot run {command[0]}: {error.strerror}{advice}") from None
        log(f"mpirun runs with PID {self._process.pid}")
        self._ports_interval = _FIRST_PORTS_SECONDS
        self._ports_at = math.inf
        if self._network is not None:
            self._ports_at = time.monotonic() + _FIRST_PORTS_SECONDS
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self._read)

    @property
    def code(self) -> int:
        """The exit code of mpirun, negative if a signal ended mpirun; 1 while mpirun runs."""
        code = self._process.returncode
        return 1 if code is None else code

    @property
    def output(self) -> str:
        """The last output of mpirun, which may explain a failure."""
        return self._output.decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        """The process id of mpirun."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped mpirun. A stopped mpirun keeps programs from leaving MPI."""
        return process_info.state_letter(self.pid) in "Tt"

    def begin_next(self, log: Callable[[str], None], on_signal: Callable[[int], None]) -> None:
        """Serve the next attempt at the job, which has another log and handler of signals."""
        self._log, self._on_signal = log, on_signal
        self._output.clear()

    def has_just_ended(self) -> bool:
        """Return true at the first call after mpirun has ended."""
        if self.ended_at is not None or self._process.poll() is None:
            return False
        self.ended_at = time.monotonic()
        self._log(f"mpirun ended with {describe(self.code)}")
        return True

    def stop(self, now: float) -> None:
        """Ask mpirun to end, and kill mpirun later if it has not ended by itself."""
        self._kill_at = min(self._kill_at, now + _GRACE_SECONDS)
        if not self._was_asked_to_end:
            self._was_asked_to_end = True
            self._signal(self._end_signal)
            self._continue()

    def expect_end(self, seconds: float, now: float) -> None:
        """Note that all instances have ended; kill mpirun if it still runs after ``seconds``."""
        self.is_expected_to_end = True
        self._continue()
        self.end_by = now + seconds
        self._kill_at = min(self._kill_at, self.end_by)

    def all_connected(self) -> None:
        """Check mpirun's ports a last time; mpirun opens no ports once all wrappers connected."""
        self._move_ports()
        self._ports_at = math.inf

    def wait(self, seconds: float) -> None:
        """Wait until mpirun has ended, at most ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        is_confirming = self._pending_signal and self.ended_at is None
        confirm_at = self._check_signals_at if is_confirming else math.inf
        return min(self._kill_at, self._ports_at, confirm_at)

    def on_time(self, now: float) -> None:
        """Check mpirun's signals and ports, and kill mpirun if its time to end is over."""
        if now >= self._check_signals_at and self.ended_at is None:
            self._check_signals(now)
        if now >= self._ports_at:
            self._ports_interval = min(1.25 * self._ports_interval, _MAX_PORTS_SECONDS)
            self._ports_at = now + self._ports_interval
            self._move_ports()
        if now >= self._kill_at:
            self._kill()

    def end(self) -> None:
        """End mpirun and all processes that mpirun has started on this host."""
        if self._process.poll() is None:
            self.stop(time.monotonic())
            try:
                self._process.wait(max(0.0, self._kill_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        limit = time.monotonic() + _KILL_SECONDS
        # Orphaned descendants become the launcher's children. Without children, the search through
        # all processes of the machine is left out.
        while process_info.has_children(os.getpid()) and time.monotonic() < limit:
            left = [pid for pid in process_info.descendants(os.getpid()) if self._is_ours(pid)]
            if not left:
                break
            for pid in left:
                process_control.signal_process(pid, signal.SIGKILL)
            for pid in left:
                # waitpid accepts only children.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)

    def _move_ports(self) -> None:
        """Move mpirun's sockets that listen on every address of the machine to the job's network.

        Moving the sockets needs permission to trace mpirun. Containers often forbid tracing.
        """
        if self._network is None or math.isinf(self._ports_at):
            return
        try:
            ports = program_environment.import_lent_sockets().move_of(self.pid, self._network)
        except ProcessLookupError:
            return  # mpirun has ended; the supervisor handles its end
        except OSError as error:
            self._ports_at = math.inf
            self._log(
                "mpirun listens on every address of this machine: the system does not let "
                f"the launcher change mpirun's sockets ({error.strerror})"
            )
            return
        if ports:
            named = " and ".join(map(str, ports))
            subject = (
                f"ports {named} of mpirun listen"
                if len(ports) > 1
                else f"port {named} of mpirun listens"
            )
            self._log(f"{subject} only on {self._network}")

    def _check_signals(self, now: float) -> None:
        pending = process_info.pending_signals(self.pid)
        found = next((number for number in self._blocked if number in pending), 0)
        was_found, self._pending_signal = found == self._pending_signal, found
        # A signal is reported only at the second check. If the signal was sent to all processes of
        # the job, the launcher has received the signal as well by then.
        self._check_signals_at = now + (_SIGNALS_SECONDS if was_found else _SIGNALS_AGAIN_SECONDS)
        if found and was_found:
            self._on_signal(found)

    def _continue(self) -> None:
        """Continue mpirun if it is stopped, so that it can end and remove its files."""
        if self.is_stopped:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            process_control.signal_process(self._process.pid, number)

    def _kill(self) -> None:
        self._kill_at = math.inf
        if self._process.poll() is None:
            # SIGKILL is sent first, because writing to the log may fail.
            self._signal(signal.SIGKILL)
            self._log("mpirun did not end by itself, so the launcher killed mpirun")

    def _is_ours(self, pid: int) -> bool:
        return self._mark in (process_info.read_file(pid, "environ") or b"")

    def _read(self, pipe: Any, _: int) -> None:
        try:
            data = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(pipe)
            pipe.close()  # a long job may start many mpiruns
            return
        self._output = (self._output + data)[-_CHUNK:]
