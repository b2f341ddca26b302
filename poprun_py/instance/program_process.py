"""The program of an instance as a child process: start, output, signals, pausing and killing."""

import errno
import os
import select
import sys
import time
from io import FileIO

from poprun_py import process_info
from poprun_py.instance import binding, control_protocol, process_control, program_environment
from poprun_py.instance.quick_imports import signal, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from resource import struct_rusage
    from typing import NoReturn

    from poprun_py.instance.launcher_channel import LauncherChannel
    from poprun_py.instance.prepared_python import PreparedPython
    from poprun_py.instance.program_input import ProgramInput, Pty
    from poprun_py.instance.transferred_files import ReceivedFile

_CHUNK = 1 << 16
_INT_BYTES = 4  # the size of a file descriptor in a message of a Unix socket
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
# The exit codes of success. After such an exit code, processes that the program left running, such
# as an upload, have the job's grace time to end. 75 is popdist_py.RESUME_EXIT_CODE.
_GOOD_CODES = (0, 75)
_LEFTOVER_SECONDS_AFTER_FAILURE = 0.1
_LEAST_SECONDS_AFTER_EXCEPTION = 1.0
# The seconds between two attempts to kill all processes of the program. The wrapper repeats the
# attempt, because a process may start another process during the attempt.
_KILL_AGAIN_SECONDS = 0.05
_KILLED_AFTER_EXCEPTION = (
    "poprun-py: the program was killed {:g} s (--grace) after the exception that ended its main "
    "thread: it was waiting for threads that are not daemons, or for its child processes\n"
)


def exec_program(command: list[str], report: int) -> "NoReturn":
    """Replace this process by the program; on failure, write the reason to ``report`` and exit."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(report, f"{command[0]}: {error.strerror}".encode(errors="replace"))
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE)


class ProgramProcess:
    """The program of an instance."""

    def __init__(self, command: list[str], channel: "LauncherChannel") -> None:
        self.command = command
        self.pid = 0  # the program's process id; 0 if no process could be started
        self.started_ns = 0
        self.start_error = ""
        # The program's exit code, or minus the signal that killed it; None while the program runs.
        self.exit_code: int | None = None
        self.is_stopping = False  # whether ``stop`` was called
        self.output = ProgramOutput(channel.send_bytes)
        self.input: ProgramInput | None = None
        self.received_file: ReceivedFile | None = None
        # The spare, which may fork the program, is not a process of the program.
        self.prepared: PreparedPython | None = None
        self.grace_seconds = 0.0
        self._channel = channel
        self._kill_at = float("inf")
        # The time at which to kill the program after an exception ended its main thread; None
        # before such an exception.
        self._exception_kill_at: float | None = None
        self._was_killed_after_exception = False
        self._suspended: list[int] = []
        self._reported_leftovers: set[int] = set()

    @property
    def is_running(self) -> bool:
        """Whether the program has not ended."""
        return self.exit_code is None

    def start(self, handled_signals: "Collection[int]", forks_spare: bool = False) -> None:
        """Bind this process, and start the program with the same binding.

        In the program, the ``handled_signals`` of this process have their default effect. If
        ``forks_spare`` is true, the program forks a spare for later restarts, if it can.
        """
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        # If the child executes the program, the kernel closes the report pipe. If the child cannot
        # execute the program, it writes the reason into the report pipe.
        report_read, report_write = os.pipe()
        binding.apply_planned()
        self.started_ns = time.monotonic_ns()
        if self.prepared is not None and self.input is None and self.received_file is None:
            self.pid = self.prepared.fork_program(out_write, err_write)
        if not self.pid:
            if forks_spare:
                # The import is not at the top, because it would delay the start of all other jobs.
                from poprun_py.instance.prepared_python import PreparedPython

                self.prepared = PreparedPython()
            self._fork_and_exec(
                self.command, out_write, err_write, report_write, handled_signals, forks_spare
            )
            if forks_spare and self.prepared is not None:
                self.prepared.close_requests()
        for descriptor in (out_write, err_write, report_write):
            os.close(descriptor)
        if self.received_file is not None:
            self.received_file.close()
        self.start_error = os.read(report_read, 4096).decode(errors="replace")
        os.close(report_read)
        self.output.add(FileIO(out_read), control_protocol.STDOUT)
        self.output.add(FileIO(err_read), control_protocol.STDERR)

    def make_spare(self, messages: int) -> bool:
        """Make a spare before the first program starts; return whether it exists.

        A message of the launcher, which arrives at the descriptor ``messages``, ends the attempt.
        """
        # The import is not at the top, because it would delay the start of all other jobs.
        from poprun_py.instance.prepared_python import PreparedPython, runs_hook

        if not runs_hook(self.command):
            return False
        # Imports of numerical libraries read the CPUs, and programs inherit the memory policy.
        binding.apply_planned()
        null = os.open(os.devnull, os.O_RDWR)
        # Without the hook, the second command would run the program.
        for command in ([self.command[0], "-c", ""], self.command):
            spare = self.prepared = PreparedPython(is_ahead=True)
            self._fork_and_exec(command, null, null, null, (), True)
            spare.close_requests()
            if self.pid and not _ends_before(self.pid, messages):
                process_control.signal_group(self.pid, signal.SIGKILL)
            if self.pid:
                os.waitpid(self.pid, 0)
            self.pid = 0
            has_spare, has_hook = spare.pid > 0, spare.is_impossible
            spare.program_ended()
            if not has_hook:
                break
        os.close(null)
        return has_spare

    def _fork_and_exec(
        self,
        command: list[str],
        out: int,
        err: int,
        report: int,
        handled_signals: "Collection[int]",
        forks_spare: bool,
    ) -> None:
        """Fork a child that executes a command."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # fork fails if, for example, the system has too many processes
            os.write(report, f"{command[0]}: {error.strerror}".encode(errors="replace"))
            return
        if pid == 0:
            try:
                self._become_child(parent, out, err, handled_signals)
                if forks_spare and self.prepared is not None:
                    self.prepared.offer(parent)
                exec_program(command, report)
            finally:
                os._exit(_NOT_EXECUTABLE)
        self.pid = pid

    def _become_child(
        self, parent: int, out: int, err: int, handled_signals: "Collection[int]"
    ) -> None:
        """In the child, leave the wrapper's process group and redirect the output."""
        if self.input is not None:
            out, err = self.input.typed.become_stdin(out, err)
        else:
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (*handled_signals, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        process_control.die_with_parent(parent)
        _take_launchers_stdin()
        os.dup2(out, 1)
        os.dup2(err, 2)
        self._channel.close()

    def collect_ended(self) -> "struct_rusage | None":
        """Collect child processes that have ended, including orphans of the program.

        Return the resource usage of the program if it has just ended or could not be started.
        """
        if not self.pid and self.is_running:
            import resource

            self.record_end(_NOT_EXECUTABLE << 8)
            return resource.getrusage(resource.RUSAGE_CHILDREN)
        program_usage: struct_rusage | None = None
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return program_usage
            if pid == 0:
                return program_usage
            if pid == self.pid:
                self.record_end(status)
                program_usage = usage
            elif self.prepared is not None and pid == self.prepared.pid:
                self.prepared.ended()

    def record_end(self, status: int) -> None:
        """Record the program's wait status, and limit the time for processes it left running."""
        code = os.waitstatus_to_exitcode(status)
        # If the wrapper killed the program after an exception, the recorded exit code is 1, as if
        # Python itself had exited after the exception.
        is_killed = self._was_killed_after_exception and code == -signal.SIGKILL
        self.exit_code = 1 if is_killed else code
        if self.input is not None:
            self.input.ended()
        if self.prepared is not None and (text := self.prepared.program_ended()):
            self._channel.send_bytes(control_protocol.STDERR, text)
        is_good = self.exit_code in _GOOD_CODES
        self._kill_after(self.grace_seconds if is_good else _LEFTOVER_SECONDS_AFTER_FAILURE)

    def is_all_over(self) -> bool:
        """Return whether the program, its output and all processes that it started have ended."""
        return (
            not self.is_running
            and not self.output.sources
            and not process_info.has_children(os.getpid(), self._prepared_pid)
        )

    def send_signal(self, number: int) -> None:
        """Send a signal to the program; after its end, send SIGTERM or SIGINT to its processes."""
        if self.is_running and self.pid:
            process_control.signal_group(self.pid, number)
        elif not self.is_running and number in (signal.SIGTERM, signal.SIGINT):
            for pid in self._descendants():
                process_control.signal_process(pid, number)

    def stop(self, grace_seconds: float, number: int = signal.SIGTERM) -> None:
        """Send the program a signal to end; after ``grace_seconds``, kill all its processes.

        A second call of ``stop`` sends no signal, but can shorten the grace time.
        """
        self.resume()
        self._kill_after(grace_seconds)
        if not self.is_stopping:
            self.is_stopping = True
            self.send_signal(number)

    def pause(self) -> None:
        """Suspend all processes of the program."""
        self._suspended = process_control.suspend_descendants(os.getpid())

    def resume(self) -> None:
        """Continue the processes that ``pause`` suspended."""
        for pid in self._suspended:
            process_control.signal_process(pid, signal.SIGCONT)
        self._suspended.clear()

    def limit_after_exception(self) -> None:
        """Give the program the grace time to end, because an exception ended its main thread.

        Without a limit, Python might wait for threads and pools forever, while other instances wait
        for this program.
        """
        if self._exception_kill_at is None:
            self._exception_kill_at = time.monotonic() + self._seconds_after_exception()

    def on_time(self, now: float) -> None:
        """Kill the program if a kill is due, and check whether the program has read its input."""
        if self._exception_kill_at is not None and now >= self._exception_kill_at:
            self._exception_kill_at = float("inf")
            if self.is_running and not self.is_stopping:
                self._was_killed_after_exception = True
                text = _KILLED_AFTER_EXCEPTION.format(self._seconds_after_exception())
                self._channel.send_bytes(control_protocol.STDERR, text.encode())
                self._kill_at = now
        if now >= self._kill_at:
            self._kill_at = now + _KILL_AGAIN_SECONDS
            self._kill_all()
        if self.input is not None:
            self.input.typed.on_time(now)

    def next_deadline(self) -> float:
        """Return the time when ``on_time`` must be called next; infinity for never."""
        kill_at = min(self._kill_at, self._exception_kill_at or self._kill_at)
        return kill_at if self.input is None else min(kill_at, self.input.typed.next_deadline())

    def _kill_after(self, seconds: float) -> None:
        """Schedule the kill of all processes in ``seconds``, unless a kill is due sooner."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _seconds_after_exception(self) -> float:
        return max(self.grace_seconds, _LEAST_SECONDS_AFTER_EXCEPTION)

    def _kill_all(self) -> None:
        """Kill the program and every process that it has started."""
        if self.is_running:
            process_control.signal_group(self.pid, signal.SIGKILL)
        left = self._descendants()
        if self.exit_code in _GOOD_CODES:
            self._report_leftovers(left)
        for pid in left:
            process_control.signal_process(pid, signal.SIGKILL)

    @property
    def _prepared_pid(self) -> int:
        return 0 if self.prepared is None else self.prepared.pid

    def _descendants(self) -> list[int]:
        """Return all processes that the program has started, parents before children."""
        without = self._prepared_pid
        return [pid for pid in process_info.descendants(os.getpid()) if pid != without]

    def _report_leftovers(self, pids: list[int]) -> None:
        """Report each process that the program left running and the wrapper kills, only once."""
        new = [pid for pid in pids if pid not in self._reported_leftovers]
        self._reported_leftovers.update(new)
        if new:
            commands = [[pid, process_info.command_line(pid)] for pid in new]
            self._channel.send(control_protocol.LEFTOVERS, commands)


def _ends_before(pid: int, messages: int) -> bool:
    """Wait until a child ends or a message arrives; return whether the child has ended."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(messages, select.POLLIN)
    ready = dict(poll.poll())
    os.close(process)
    return process in ready


def _take_launchers_stdin() -> None:
    """Let the program of one instance read the launcher's stdin; other programs get /dev/null."""
    path = os.environ.pop("POPRUN_STDIN", "")
    reader = int(os.environ.pop("POPRUN_STDIN_READER", "0"))
    if not path:
        return
    descriptor = _launchers_stdin(path) if program_environment.rank() == reader else None
    if descriptor is None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 0:
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _launchers_stdin(path: str) -> int | None:
    """Return a descriptor of the launcher's standard input; None if the launcher is gone."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.sendall(control_protocol.pack(control_protocol.STDIN))
        _, sent, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(_INT_BYTES))
    except OSError:
        return None
    finally:
        connection.close()
    return int.from_bytes(sent[0][2][:_INT_BYTES], sys.byteorder) if sent else None


class ProgramOutput:
    """The output of one program, from its pipes and from its terminals if it has any.

    ``send`` is called with each part of the program's output and the kind of message for it.
    """

    def __init__(self, send: "Callable[[bytes, bytes], None]") -> None:
        self._send = send
        # Pipes and terminals that may have more output, each with the kind of message for it.
        self.sources: dict[int, tuple[FileIO | Pty, bytes]] = {}
        self._terminal = -1  # the descriptor of the program's controlling terminal
        self.num_bytes = 0

    def add(self, source: "FileIO | Pty", kind: bytes) -> None:
        """Add a pipe or a terminal; the first terminal is the program's controlling terminal."""
        descriptor = source.fileno()
        os.set_blocking(descriptor, False)
        self.sources[descriptor] = source, kind
        if self._terminal < 0 and not isinstance(source, FileIO):
            self._terminal = descriptor

    def read(self, descriptor: int) -> None:
        """Read the program's output from a descriptor that is ready, and send the output."""
        if self._terminal not in self.sources:
            self._pass_on(descriptor, self._read(descriptor))
            return
        written = self._read(self._terminal)
        others = [(each, self._read(each)) for each in self.sources if each != self._terminal]
        if any(data for _, data in others):
            # Before its text on stderr, the program may have written more to its terminal.
            more = self._read(self._terminal)
            written = (written or b"") + (more or b"") or more
        lines, newline, prompt = (written or b"").rpartition(b"\n")
        self._pass_on(self._terminal, lines + newline or None)
        for each, data in others:
            self._pass_on(each, data)
        # A prompt (text without a newline) is sent last, because the program wrote its text on
        # stderr before the prompt.
        self._pass_on(self._terminal, (prompt or None) if written else written)

    def _read(self, descriptor: int) -> bytes | None:
        return self.sources[descriptor][0].read(_CHUNK)

    def _pass_on(self, descriptor: int, data: bytes | None) -> None:
        """Send output from a descriptor, or close the descriptor if ``data`` is empty."""
        source, kind = self.sources[descriptor]
        if data:
            self.num_bytes += len(data)
            self._send(kind, data)
        elif data is not None:
            del self.sources[descriptor]
            source.close()
