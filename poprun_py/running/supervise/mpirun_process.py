"""The process that starts the wrappers: mpirun, from its start to the last trace of it.

It knows neither the instances nor mpirun's arguments.
"""

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
from poprun_py.instance.process_control import GracefulStop
from poprun_py.running.supervise.job import Job, describe

_CHUNK = 1 << 16
# The time for mpirun to end after SIGTERM: it has nothing to save.
_GRACE_SECONDS = 2.0
# Open files of mpirun: its own, and those of an instance of this host, or of another host.
_FILES, _FILES_OF_CHILD = 32, 4
# What mpirun has started is killed for so long: each look may find another process.
_KILL_SECONDS = 2.0
# It listens some 20 ms after its start, and other hosts connect some 100 ms later.
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.01, 0.25
# Users and schedulers end processes by these signals. They are kept from mpirun, so that the
# launcher decides what they do to the job.
_KEPT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)
# How often to check whether mpirun was sent such a signal, and how soon to check again after one.
_SIGNALS_SECONDS, _SIGNALS_AGAIN_SECONDS = 0.25, 0.05


def enough_files(job: Job, limits: tuple[int, int]) -> tuple[int, int]:
    """Return the (soft, hard) limit of open files with which mpirun can start its instances.

    Without it mpirun kills instances that it has begun to start, and gives no reason.

    Args:
        job: What is to run.
        limits: The user's; the launcher itself takes the hard one.

    Raises:
        StartError: The hard limit is too low.
    """
    soft, hard = (math.inf if limit < 0 else limit for limit in limits)
    total = job.num_instances
    children = total
    if job.hosts.listen is not None:
        children = job.hosts.names.count(socket.gethostname()) + len(set(job.hosts.names))
    files_of_peer = 1 if job.files.output_dir is None else 3
    wanted = _FILES + max(_FILES_OF_CHILD * children, files_of_peer * total)
    if hard < wanted:
        raise StartError(
            f"{total} instance{'s need' if total > 1 else ' needs'} {wanted} open files, and the "
            f"hard limit is {hard}: raise it (ulimit -n {wanted} as root, or "
            "/etc/security/limits.conf), or start fewer instances"
        )
    return (wanted, limits[1]) if soft < wanted else limits


def lines_of_daemon(host: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a wrapper did about the sockets of its MPI daemon, in lines for the log."""
    for port in report.get("daemon_ports", ()):
        yield f"port {port} of the MPI daemon of host {host} is kept to the job's network"
    if problem := report.get("daemon_problem"):
        yield (
            f"the MPI daemon of host {host} listens on every address of it: the system does not "
            f"lend its sockets to the first instance there ({problem})"
        )


class _Ports:
    """Where mpirun listens while it starts: on every address of the machine, until it is seen.

    Its sockets are moved to one network, where the kernel lends them: to whoever may trace the
    process, which containers often forbid.
    """

    def __init__(self, process: int, network: str | None, log: Callable[[str], None]) -> None:
        self._process = process
        self._network = network
        self._log = log
        self._interval = _LOOK_SECONDS
        self._next = time.monotonic() + _LOOK_SECONDS
        self.is_done = network is None

    def next_deadline(self) -> float:
        """Return when to look again; inf for never."""
        return math.inf if self.is_done else self._next

    def on_time(self, now: float) -> None:
        """Look, if it is time."""
        if now >= self.next_deadline():
            self.look()
            self._interval = min(1.25 * self._interval, _LONGEST_LOOK_SECONDS)
            self._next = now + self._interval

    def look(self) -> None:
        """Move what listens on every address now."""
        if self.is_done or self._network is None:
            return
        try:
            ports = program_environment.import_lent_sockets().move_of(self._process, self._network)
        except ProcessLookupError:
            return  # it has ended, as others will notice
        except OSError as error:
            self.is_done = True
            self._log(
                "mpirun listens on every address of this machine: the system does not lend its "
                f"sockets to the launcher ({error.strerror})"
            )
            return
        for port in ports:
            self._log(f"port {port} of mpirun is kept to {self._network}")


class Mpirun:
    """A running mpirun.

    Args:
        command: What to run.
        environ: Its environment.
        mark: Text in the environment by which every process of the job is recognised.
        selector: Reads what mpirun says.
        log: Takes a line of the launcher's own log.
        open_files: Its (soft, hard) limit of open files, which this host's instances inherit.
        network: Where alone it may listen, as ``popdist_listening.address_in`` has it; or None.
        end_signal: The signal on which mpirun ends in good order.

    Raises:
        StartError: It cannot be run.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        mark: str,
        selector: selectors.BaseSelector,
        log: Callable[[str], None],
        open_files: tuple[int, int],
        *,
        network: str | None,
        end_signal: int = signal.SIGTERM,
    ) -> None:
        self._end_signal = end_signal
        self._kept = tuple(number for number in _KEPT_SIGNALS if number != end_signal)
        self._signals_at, self._seen = 0.0, 0
        self.ended_at: float | None = None
        self._mark = os.fsencode(mark)
        self._selector = selector
        self._log = log
        self._said = bytearray()
        self._steps = GracefulStop(ask=self._ask, force=self._kill)
        self.is_awaited = False  # whether it has nothing left to do
        parent = os.getpid()

        def prepare() -> None:
            # This lets mpirun end its daemons; SIGKILL would have MPICH kill the wrappers before
            # they can clean up.
            process_control.die_with_parent(parent, end_signal)
            # A blocked signal stays pending, whatever handler mpirun installs for it.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._kept)
            process_control.set_open_files(open_files)

        try:
            self._process = subprocess.Popen(
                command,
                # Not the launcher's input: Open MPI 5 would never tell instance 0 where it ends.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                # Ctrl-C is the launcher's to handle: mpirun must not get it from the terminal.
                start_new_session=True,
                preexec_fn=prepare,  # safe in a launcher of one thread
            )
        except OSError as error:
            advice = f": {PROCESSES_ADVICE}" if error.errno == errno.EAGAIN else ""
            raise StartError(f"cannot run {command[0]}: {error.strerror}{advice}") from None
        log(f"mpirun runs with PID {self._process.pid}")
        self._ports = _Ports(self._process.pid, network, log)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self._read)

    @property
    def code(self) -> int:
        """How it ended; 1 while it runs."""
        code = self._process.returncode
        return 1 if code is None else code

    @property
    def words(self) -> str:
        """What it wrote; useful where it explains a failure."""
        return self._said.decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal: programs then wait for it where they leave MPI."""
        return process_info.state_letter(self.pid) in "Tt"

    def has_just_ended(self) -> bool:
        """Tell, once, that it has ended."""
        if self.ended_at is not None or self._process.poll() is None:
            return False
        self.ended_at = time.monotonic()
        self._log(f"mpirun ended with {describe(self.code)}")
        return True

    def signal_kept(self, now: float) -> int:
        """Return a signal that was sent to mpirun and kept from it; 0 for none.

        On that signal, mpirun would kill the wrappers within half a second, despite ``--grace``.
        """
        if now < self._signals_at or self.ended_at is not None:
            return 0
        pending = process_info.pending_signals(self.pid)
        found = next((number for number in self._kept if number in pending), 0)
        was_seen, self._seen = found == self._seen, found
        # A signal is reported at the second check. By then, if it was sent to all processes of the
        # job, the launcher has received it itself.
        self._signals_at = now + (_SIGNALS_SECONDS if was_seen else _SIGNALS_AGAIN_SECONDS)
        return found if was_seen else 0

    def stop(self, now: float) -> None:
        """Ask it to end; kill it if it does not."""
        self._steps.begin(now, _GRACE_SECONDS)

    def await_end(self, seconds: float, now: float) -> None:
        """It has nothing left to do: kill it if it does not end by itself."""
        self.is_awaited = True
        self._go_on()
        self._steps.force_after(seconds, now)

    def has_started_all(self) -> None:
        """All instances are there: it listens wherever it ever will."""
        self._ports.look()
        self._ports.is_done = True

    def next_deadline(self) -> float:
        """Return when it is to be looked at, or killed; inf for never."""
        look_at = self._signals_at if self._seen and self.ended_at is None else math.inf
        return min(self._steps.next_deadline(), self._ports.next_deadline(), look_at)

    def on_time(self, now: float) -> None:
        """Kill it if its time is over; its daemons follow."""
        self._ports.on_time(now)
        self._steps.on_time(now)

    def end(self) -> None:
        """Leave nothing behind of it or of what it started on this host."""
        if self._process.poll() is None:
            self.stop(time.monotonic())
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                patience = self._steps.next_deadline() - time.monotonic()
                self._process.wait(None if math.isinf(patience) else max(0.0, patience))
            self._steps.on_time(time.monotonic())
        if self._process.stdout is not None:
            self._process.stdout.close()
        limit = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < limit:
            left = [pid for pid in process_info.descendants(os.getpid()) if self._is_ours(pid)]
            if not left:
                break
            for pid in left:
                process_control.signal_process(pid, signal.SIGKILL)
            for pid in left:
                # Only a direct child can be collected; the others become our children one by one.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)

    def _ask(self) -> None:
        self._signal(self._end_signal)
        self._go_on()

    def _go_on(self) -> None:
        """One that was stopped cannot end: it would be killed, and leave files behind."""
        if self.is_stopped:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            process_control.signal_process(self._process.pid, number)

    def _kill(self) -> None:
        if self._process.poll() is None:
            # First the signal: nobody may be left to take the line.
            self._signal(signal.SIGKILL)
            self._log("mpirun did not end by itself: it was killed")

    def _is_ours(self, pid: int) -> bool:
        return self._mark in (process_info.read_file(pid, "environ") or b"")

    def _read(self, pipe: Any, _: int) -> None:
        try:
            data = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(pipe)
            return
        self._said = (self._said + data)[-_CHUNK:]
