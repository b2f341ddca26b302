"""The wrapper: the parent process of one program, which reports on the program to the launcher.

Every instance has a wrapper, between mpirun and the program. The wrapper stays the parent of the
program, because only a parent learns how a process ended. Only a living ancestor can collect the
processes that a program leaves behind. start_wrapper.py starts the wrapper.

If POPRUN_CONTROL is not set, because a user copied the command into a shell, the wrapper binds
itself to the planned CPUs and replaces itself by the program.
"""

import os
import select
import sys
import time

from poprun_py.instance import (
    binding,
    control_protocol,
    job_folders,
    launcher_channel,
    process_control,
    program_environment,
)
from poprun_py.instance.launcher_channel import LauncherChannel
from poprun_py.instance.program_process import ProgramProcess, exec_program
from poprun_py.instance.program_reports import ProgramReports
from poprun_py.instance.quick_imports import loads, signal

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from poprun_py.instance.job_folders import CheckpointMemory, JobFolder
    from poprun_py.instance.prepared_python import PreparedPython
    from poprun_py.instance.starter import Keepers
    from poprun_py.instance.transferred_files import SentFiles
    from poprun_py.machines.leases import Lease

# Open MPI ends instances by SIGTERM, and MPICH by the signal that ended mpirun.
_ENDING = (signal.SIGTERM, signal.SIGQUIT)
_SIGNALS = (*_ENDING, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
# The grace time of a program whose launcher is gone is short, because its output is lost anyway.
_ORPHAN_GRACE_SECONDS = 1.0
# After SIGTERM from mpirun, the grace time never ends: mpirun kills the wrapper 0.25 seconds later.
_UNLIMITED_GRACE_SECONDS = 3600.0
# Two seconds after a program and all of its processes have ended with the exit code 0, the wrapper
# ends, so that Open MPI sees the end of the instance.
LEAVE_SECONDS = 2.0
# A launcher that was killed may keep the job's folders locked for about 0.3 seconds.
_DYING_SECONDS = 0.3
_REAP_MILLISECONDS = 20


def main(argv: list[str]) -> int:
    """Run the program whose command follows ``--``; return the exit code of the wrapper."""
    # The launcher makes mpirun block SIGTERM, SIGINT and SIGABRT, and some versions of mpirun pass
    # their signal mask on to the wrapper.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGABRT))
    command = [_unescape(word) for word in argv[argv.index("--") + 1 :]]
    address = os.environ.get("POPRUN_CONTROL")
    if not address:
        binding.apply_planned()
        os.environ.setdefault("MASTER_PORT", "29500")
        program_environment.complete()
        exec_program(command, 2)
    token = os.environ.pop("POPRUN_TOKEN", "")
    channel = LauncherChannel(launcher_channel.connect(address, token))
    daemon, starter = os.getppid(), os.getpid()
    keepers, rank, again = None, program_environment.rank(), False
    if os.environ.get("POPDIST_MEMORY_CHECKPOINTS") == "1":
        # The import is not at the top, because it would delay the start of all other jobs.
        from poprun_py.instance.starter import leave_mpirun

        channel, keepers = leave_mpirun(channel, address, token)
        rank, again = keepers.rank, keepers.has_taken_over
    memory_folder = ""
    if address.startswith("tcp:"):
        os.environ["POPDIST_SECRET"] = program_environment.programs_secret(token)
        memory_folder = job_folders.memory_folder_name(token)
        # The job's token is not sent over the network, because launcher and wrapper have already
        # proved that they know it.
        token = ""
    channel.send_hello(token, rank, again=again)
    process_control.become_subreaper()
    # The job's folders are made now, because the wrapper has to wait for other instances anyway.
    folders = job_folders.use_folders(address, memory_folder, daemon)
    return Wrapper(channel, command, folders, daemon, starter, keepers).run()


def _unescape(word: str) -> str:
    """Undo the launcher's escaping of ``word`` for mpirun, which turned ``:`` into ``%:``."""
    return word[1:] if word.endswith(":") and word != ":" and not word[:-1].strip("%") else word


class Wrapper:
    """The parent process of one program.

    Args:
        channel: The connection to the launcher.
        command: The words of the program's command.
        folders: The job's folders on this host.
        daemon: The process id of mpirun or of MPI's daemon, which has started ``starter``.
        starter: The process id of the starter; of this process in jobs without a starter.
        keepers: The keepers, which take over if the wrapper is killed; None without keepers.
    """

    def __init__(
        self,
        channel: LauncherChannel,
        command: list[str],
        folders: "list[JobFolder]",
        daemon: int,
        starter: int,
        keepers: "Keepers | None",
    ) -> None:
        self._channel = channel
        self._command = command
        # The environment of every program, before the variables that its start adds.
        self._environ = dict(os.environ)
        # The CPUs of this process before it was bound for a program.
        self._cpus = os.sched_getaffinity(0)
        self._folders = folders
        self._lease: Lease | None = None  # the lease of CPUs for all instances on this host
        self._wake = -1  # the pipe with a byte for each signal; -1 before the first program starts
        self._daemon, self._starter = daemon, starter
        self._moved_sockets: dict[str, Any] = {}
        self._keepers = keepers
        self._states: CheckpointMemory | None = None
        if keepers is not None and keepers.states_path:
            self._hold_states(keepers.states_path)
        # The spare, which can fork the program of the next attempt.
        self._prepared: PreparedPython | None = None if keepers is None else keepers.spare
        self._is_restarted = False  # whether another attempt may follow, which needs the states
        # The time from which the wrapper may end: 0 after the message BYE or the launcher's end.
        self._leave_at = float("inf")
        self._prepare_program()

    def _prepare_program(self) -> None:
        """Make the objects for the program of one attempt."""
        self._program = ProgramProcess(self._command, self._channel)
        self._program.prepared = self._prepared
        self._reports = ProgramReports(self._program, self._channel)
        self._sent_files: SentFiles | None = None
        self._unsent_parts: Iterator[bytes] = iter(())
        self._spans = ""  # the prefix of the paths of the program's span files
        self._is_started = self._is_end_reported = self._has_told_of_mpi = False

    def run(self) -> int:
        """Run the program, in each attempt at the job; return the exit code for mpirun."""
        try:
            self._moved_sockets = self._move_daemon_sockets()
            while not self._is_started:
                for kind, payload in self._channel.wait_for_messages():
                    self._handle(kind, payload)
            # On its own host, the launcher removes the folders of jobs that were killed.
            if self._channel.is_remote and program_environment.is_first_on_host():
                job_folders.remove_abandoned(job_folders.folder_locations())
            self._loop()
        finally:  # the messages STOP and BYE before a program starts raise SystemExit
            self._release()
        if self._channel.is_connected:
            # mpirun must not see a failure, because the launcher itself ends a failed job.
            return 0
        code = self._program.exit_code or 0
        return code if code >= 0 else 128 - code

    # --- before the program starts ----------------------------------------------------------

    def _move_daemon_sockets(self) -> "dict[str, Any]":
        """Make MPI's daemon, which started this process, listen on the job's network only.

        Only the first instance of a host moves the daemon's sockets. On the launcher's host, the
        launcher itself moves the daemon's sockets. A keeper that takes over leaves them alone,
        because the daemon may have ended, and another process may have its process id.

        Returns:
            The ports of the moved sockets or a problem, for the STARTED message.
        """
        network = os.environ.get("POPDIST_NETWORK")
        is_first = program_environment.is_first_on_host()
        has_taken_over = self._keepers is not None and self._keepers.has_taken_over
        if not network or not is_first or not self._channel.is_remote or has_taken_over:
            return {}
        try:
            sockets = program_environment.import_lent_sockets()
            return {"daemon_ports": sockets.move_of(self._daemon, network)}
        except OSError as error:
            return {"daemon_problem": str(error.strerror)}

    def _handle_before_start(self, kind: bytes, payload: bytes) -> None:
        """Handle a message of the launcher, which sends GO when every instance has connected.

        Raises:
            SystemExit: The job ended before the program could start.
        """
        if kind == control_protocol.GO:
            self._start(loads(payload))
        elif kind == control_protocol.LEASE:
            self._take_lease(loads(payload))
        elif kind == control_protocol.PREPARE:
            self._make_spare(loads(payload))
        elif kind == control_protocol.INPUT_FILE:
            self._receive_file(payload)
        elif kind in (control_protocol.STOP, control_protocol.BYE):
            # STOP means that a wrapper or a host was lost before the start. The launcher then
            # restarts the job, if it may, and the programs need the states of this host.
            self._is_restarted = kind == control_protocol.STOP or payload == b"true"
            sys.exit(1)

    def _take_lease(self, request: "dict[str, Any]") -> None:
        # The import is not at the top, because few wrappers need it: one on each remote host.
        from poprun_py.machines.remote_leases import take_for_launcher

        if self._lease is not None:
            self._lease.close()
        answer, self._lease = take_for_launcher(request, os.environ, self._daemon)
        self._channel.send_now(control_protocol.LEASED, answer)

    def _receive_file(self, part: bytes) -> None:
        from poprun_py.instance.transferred_files import ReceivedFile

        if self._program.received_file is None:
            self._program.received_file = ReceivedFile()
        if part:
            self._program.received_file.add(part)
        else:
            answer = self._program.received_file.answer()
            self._channel.send_now(control_protocol.INPUT_FILE, answer)

    def _start(self, start: "dict[str, Any]") -> None:
        """Start the program with the settings of the GO message."""
        if "keyboard" in start:
            self._prepare_keyboard(start["keyboard"])
        self._set_environment(start)
        path = os.environ.get("POPDIST_CHECKPOINT_MEMORY")
        if path and self._states is None:
            self._hold_states(path)
        self._program.grace_seconds = start.get("grace_seconds", 0.0)
        if "open_files" in start:
            process_control.set_open_files(tuple(start["open_files"]))
        if "files" in start:
            from poprun_py.instance.transferred_files import SentFiles

            self._sent_files = SentFiles()
            os.environ.update(self._sent_files.variables(start["files"]))
        if "spans" in start:
            self._spans = start["spans"] or (self._sent_files.prefix if self._sent_files else "")
        if self._program.input is not None:
            os.environ.update(self._program.input.variables())
        if self._wake < 0:
            self._install_signals()
        self._program.start(_SIGNALS, self._may_fork_spare())
        self._prepared = self._program.prepared
        self._is_started = True
        self._reports.program_started()
        found = binding.read_back(self._program.pid)
        started = {"pid": self._program.pid, "found": found, **self._moved_sockets}
        self._moved_sockets = {}
        self._channel.send(control_protocol.STARTED, started)
        self._collect_ended()

    def _set_environment(self, start: "dict[str, Any]") -> None:
        program_environment.set_variables(start["variables"])
        program_environment.set_job_folders(self._folders)
        program_environment.complete()
        self._reports.prepare(start)

    def _make_spare(self, start: "dict[str, Any]") -> None:
        """Make a spare for the first program, which the message GO will start."""
        self._set_environment(start)
        has_spare = self._program.make_spare(self._channel.descriptor)
        self._prepared = self._program.prepared
        self._begin_next()
        self._channel.send_now(control_protocol.PREPARED, has_spare)

    def _hold_states(self, path: str) -> None:
        self._states = job_folders.CheckpointMemory(path)
        self._states.hold()

    def _may_fork_spare(self) -> bool:
        """Return whether the program is to fork a spare, if it does not come from a spare."""
        program, last = self._program, self._prepared
        has_input = program.input is not None or program.received_file is not None
        if os.environ.get("POPDIST_MEMORY_CHECKPOINTS") != "1" or has_input:
            return False
        # The import is not at the top, because it would delay the start of all other jobs.
        from poprun_py.instance.prepared_python import may_prepare

        is_impossible = last is not None and last.is_impossible
        return not is_impossible and may_prepare(self._command, os.environ)

    def _prepare_keyboard(self, setup: "dict[str, Any]") -> None:
        from poprun_py.instance.program_input import ProgramInput

        program = self._program
        memory, send = self._reports.memory, self._channel.send
        program.input = ProgramInput(setup, memory, send, program.output.add)
        if program.input.terminal is not None:
            # With COLUMNS and LINES, programs would ignore the actual size of the terminal.
            for name in ("COLUMNS", "LINES"):
                os.environ.pop(name, None)

    def _install_signals(self) -> None:
        """Let each signal write a byte into a pipe, which wakes the loop."""
        self._wake, write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)

    # --- while the program runs -------------------------------------------------------------

    def _loop(self) -> None:
        """Handle events until the program has ended, its output is sent and the wrapper may end."""
        while not self._do_due_work():
            for descriptor, event in self._wait_for_events():
                if descriptor == self._wake:
                    self._on_signals(os.read(self._wake, 512))
                elif self._program.input and descriptor == self._program.input.requests:
                    self._program.input.read_requests()
                elif descriptor in self._program.output.sources:
                    self._program.output.read(descriptor)
                elif descriptor == self._channel.descriptor:
                    self._exchange(event)
        if not self._channel.is_connected:
            process_control.end_mpi_daemon(self._daemon, self._starter)

    def _do_due_work(self) -> bool:
        """Collect ended processes, do due kills and reports; return whether the wrapper may end."""
        if not self._is_started:
            return not self._channel.is_connected
        self._collect_ended()
        if self._keepers is not None:
            states_path = "" if self._states is None else self._states.path
            self._keepers.tell(program_environment.rank(), states_path, self._prepared)
        program, memory = self._program, self._reports.memory
        if program.pid > 0 and memory.failed_process() == program.pid:
            program.limit_after_exception()
        if not self._has_told_of_mpi and memory.has_started_mpi():
            self._has_told_of_mpi = True
            self._channel.send(control_protocol.STARTED_MPI, None)
        program.on_time(time.monotonic())
        self._reports.on_time(time.monotonic())
        if not self._is_end_reported and program.is_all_over():
            self._is_end_reported = self._report_end()
        # If the wrapper ended before the message BYE, MPICH would end the other instances.
        may_leave = time.monotonic() >= self._leave_at
        return self._is_end_reported and not self._channel.has_unsent and may_leave

    def _collect_ended(self) -> None:
        usage = self._program.collect_ended()
        if usage is None:
            return
        if self._states is not None:
            self._states.hold()
        if self._spans:
            from poprun_py.instance.transferred_files import write_end_time

            write_end_time(self._spans)
        self._reports.send_end(usage)

    def _wait_for_events(self) -> list[tuple[int, int]]:
        """Wait until descriptors can be read or written; return each with its poll event."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        self._channel.register(poll)
        if self._program.input is not None and self._program.input.requests >= 0:
            poll.register(self._program.input.requests, select.POLLIN)
        if self._keepers and self._prepared and self._prepared.is_awaited:
            poll.register(self._prepared.descriptor, select.POLLIN)
        if not self._channel.is_full:
            for descriptor in self._program.output.sources:
                poll.register(descriptor, select.POLLIN)
        return poll.poll(self._poll_milliseconds())

    def _poll_milliseconds(self) -> int | None:
        """Return the milliseconds until the next work is due; None if no work is scheduled."""
        if not self._is_started:
            deadline = float("inf")
        elif self._is_end_reported:
            deadline = float("inf") if self._channel.has_unsent else self._leave_at
        elif self._program.is_running:
            deadline = min(self._program.next_deadline(), self._reports.next_deadline())
        else:
            return _REAP_MILLISECONDS
        if deadline == float("inf"):
            return None
        return max(1, int(1000 * (deadline - time.monotonic())))

    def _exchange(self, event: int) -> None:
        """Exchange messages with the launcher; if the launcher is gone, end the program."""
        messages = self._channel.exchange(event)
        if messages is not None:
            for kind, payload in messages:
                self._handle(kind, payload)
            return
        self._channel.disconnect()
        self._leave_at = 0.0
        if self._sent_files is not None:
            self._sent_files.remove()
        # The wrapper reads and drops the program's output, so that the program can end.
        self._program.stop(_ORPHAN_GRACE_SECONDS)

    def _handle(self, kind: bytes, payload: bytes) -> None:
        if not self._is_started:
            self._handle_before_start(kind, payload)
            return
        if self._reports.answer(kind, payload):
            return
        if kind == control_protocol.SIGNAL:
            self._program.send_signal(loads(payload))
        elif kind == control_protocol.PAUSE:
            if loads(payload):
                self._program.pause()
                self._channel.send(control_protocol.PAUSED, None)
            else:
                self._program.resume()
        elif kind == control_protocol.STOP:
            self._program.stop(*loads(payload))
        elif kind == control_protocol.NEXT:
            self._begin_next()
        elif kind == control_protocol.BYE:
            self._leave_at, self._is_restarted = 0.0, payload == b"true"
        elif self._program.input is not None:
            self._program.input.handle(kind, payload)

    def _on_signals(self, numbers: "Iterable[int]") -> None:
        for number in numbers:
            if number in _ENDING:
                # While the launcher lives, mpirun kills the wrapper 0.25 seconds after this signal.
                # Without a launcher, only the wrapper can end the processes of the program.
                if self._program.is_running:
                    self._channel.send(control_protocol.STOP_SIGNAL, number)
                is_connected = self._channel.is_connected
                self._program.stop(_UNLIMITED_GRACE_SECONDS if is_connected else 0.0)
            elif number != signal.SIGCHLD:
                self._program.send_signal(number)

    # --- after the end of the program -------------------------------------------------------

    def _begin_next(self) -> None:
        """Wait for the start of the program in the next attempt, with the first environment."""
        self._reports.close()
        if self._program.input is not None:
            self._program.input.close()
        os.environ.clear()
        os.environ.update(self._environ)
        try:  # noqa: SIM105 (importing contextlib would take longer than this module)
            os.sched_setaffinity(0, self._cpus)
        except OSError:
            pass  # all of these CPUs may have been taken from the job meanwhile
        self._prepare_program()

    def _report_end(self) -> bool:
        """Send the rest of the program's files, then INSTANCE_ENDED; return whether all was sent.

        The program's files may exceed memory, so no part is read while many bytes are unsent.
        """
        if self._sent_files is not None:
            self._unsent_parts, self._sent_files = self._sent_files.parts(), None
        while not self._channel.is_full:
            part = next(self._unsent_parts, None)
            if part is None:
                # The next attempt has another port, because the old one may be in use by then.
                self._channel.send(
                    control_protocol.INSTANCE_ENDED, self._reports.end | launcher_channel.ports()
                )
                self._limit_stay()
                return True
            self._channel.send_bytes(control_protocol.FILE, part)
        return False

    def _limit_stay(self) -> None:
        """Set a time for the wrapper to end, because the program may have skipped MPI_Finalize.

        Open MPI notices a program without MPI_Finalize only when the wrapper ends. Then Open MPI
        ends the instances that wait for the program. A wrapper stays if it leases CPUs, or if a
        restart may need this wrapper and the states of the training on this host. No restart needs
        a wrapper whose program has started MPI.
        """
        is_open_mpi = "PMIX_RANK" in os.environ and "PMI_RANK" not in os.environ
        is_kept = "POPDIST_MEMORY_CHECKPOINTS" in os.environ
        stays = self._lease is not None or (is_kept and not self._reports.memory.has_started_mpi())
        if self._program.exit_code == 0 and is_open_mpi and not stays:
            self._leave_at = min(self._leave_at, time.monotonic() + LEAVE_SECONDS)

    def _release(self) -> None:
        """Give back the leased CPUs, leave the job's folders and close the connection."""
        if self._prepared is not None:
            self._prepared.end()
        if self._lease is not None:
            self._lease.close()
        wait_seconds = 0.0 if self._channel.is_connected else _DYING_SECONDS
        for folder in self._folders:
            folder.leave(wait_seconds)
        if self._states is not None:
            self._states.release(is_kept=self._is_restarted, wait_seconds=wait_seconds)
        if self._keepers is not None:
            self._keepers.end()
        self._channel.close()
