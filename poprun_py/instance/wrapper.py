"""The parent of one program: binds it, starts it, passes output and signals on, reports its end.

Runs in every instance, between mpirun and the program; started by main.py. Standard library
only, imports kept few: every instance pays for them. It stays the program's parent, because only a
parent learns how a process ended, and only a live ancestor can collect what the program leaves
behind.

With POPRUN_CONTROL unset (the printed command was pasted into a shell) it binds and replaces itself
by the program.
"""

import errno
import os
import select
import sys
import time

from poprun_py import process_info
from poprun_py.instance import (
    binding,
    control_protocol,
    job_folders,
    launcher_channel,
    process_control,
    program_environment,
)
from poprun_py.instance.cgroups import memory_state
from poprun_py.instance.graceful_stop import (
    GOOD_CODES,
    KILL_AGAIN_SECONDS,
    LEAST_SECONDS_AFTER_EXCEPTION,
    LEAVE_SECONDS,
    LEFTOVER_SECONDS_AFTER_FAILURE,
    ORPHAN_GRACE_SECONDS,
    UNLIMITED_GRACE_SECONDS,
    GracefulStop,
)
from poprun_py.instance.program_output import ProgramOutput
from poprun_py.instance.progress_memory import ProgressMemory
from poprun_py.instance.quick_imports import dumps, loads, signal, socket

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from resource import struct_rusage
    from typing import Any, NoReturn

    from poprun_py.instance.job_folders import JobFolder
    from poprun_py.instance.keyboard import Keyboard
    from poprun_py.instance.program_activity import SignsOfLife
    from poprun_py.instance.transferred_files import GivenFile, ProgramFiles
    from poprun_py.machines.leases import Lease
_CHUNK = 1 << 16
# mpirun ends the instances by these: Open MPI by SIGTERM, MPICH by the signal that ended mpirun.
_ENDING = (signal.SIGTERM, signal.SIGQUIT)
_SIGNALS = (*_ENDING, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
# The program's output waits in its pipe while this much is on the way to the launcher.
_MAX_UNSENT = 1 << 20
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
# How long a launcher that was killed may still have the job's folders.
_DYING_SECONDS = 0.3
_KEPT = (
    "poprun-py: {} s (--grace) after the exception that ended its main thread, the program was "
    "killed: it waited for threads that are no daemons, or for processes of its own\n"
)


def main(argv: list[str]) -> int:
    """Run the program after ``--`` and return the code to end with."""
    # The launcher has mpirun block these signals, and some mpiruns pass their signal mask on.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGABRT))
    program = [_unshield(word) for word in argv[argv.index("--") + 1 :]]
    launcher_channel.set_other_names()
    launcher_channel.drop_empty()
    address = os.environ.get("POPRUN_CONTROL")
    shared = ""
    if not address:
        _bind()
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ.update(program_environment.variables(os.environ))
        _replace(program, 2)
    token = os.environ.pop("POPRUN_TOKEN", "")
    channel = launcher_channel.connect(address, token)
    if address.startswith("tcp:"):
        # Shown at the greeting; it does not travel.
        os.environ["POPDIST_SECRET"] = launcher_channel.secret_of_programs(token)
        shared = launcher_channel.name_of_folder(token)
        token = ""
    return Wrapper(channel, program, token, shared).run()


def _unshield(word: str) -> str:
    """Undo what the launcher did to a word that mpirun would have taken for its own."""
    return word[1:] if word.endswith(":") and word != ":" and not word[:-1].strip("%") else word


def _bind() -> "dict[str, Any]":
    """Apply the plan's CPUs and memory nodes to this process; returns what was applied."""
    cpus = [int(n) for n in os.environ.get("POPRUN_CPUS", "").split(",") if n]
    nodes = [int(n) for n in os.environ.get("POPRUN_MEMORY_NODES", "").split(",") if n]
    return binding.apply(cpus, nodes)


def _replace(program: list[str], report: int) -> "NoReturn":
    """Become the program; else write why to descriptor ``report`` and end as a shell would."""
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(report, f"{program[0]}: {error.strerror}".encode(errors="replace"))
        os._exit(_NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE)


class Wrapper:
    """The parent of one program and its end of the control channel.

    ``token`` is what it shows the launcher in its first frame; ``shared`` is the
    name of their folder in memory, where the launcher may be on another host.
    """

    def __init__(
        self, channel: socket.socket, program: list[str], token: str, shared: str = ""
    ) -> None:
        self._channel = channel
        self._token = token
        self._connected = True
        self._program = program
        self._reader = control_protocol.Reader()
        # Frames that came together with the one that starts the program.
        self._early: list[tuple[bytes, bytes]] = []
        self._unsent = bytearray()
        self._pid = 0
        self._started_ns = 0
        self._output = ProgramOutput(self._queue)
        self._outcome: dict[str, Any] | None = None  # how the program ended
        self._released = False  # the launcher said bye, or is gone
        self._is_launcher_lost = False
        self._leave_at = float("inf")  # when to end without a release
        self._stop_signal = int(signal.SIGTERM)  # asks the program to end
        self._steps = GracefulStop(
            ask=lambda: self._signal_program(self._stop_signal),
            force=self._kill_tree,
            again_seconds=KILL_AGAIN_SECONDS,
        )
        self._leftover_seconds = 0.0  # given to children after a good end of the program
        self._told_left: set[int] = set()
        self._bound: dict[str, Any] = {}
        self._daemon: dict[str, Any] = {}  # what became of the sockets of MPI's daemon
        self._exec_error = ""
        self._vitals = ProgressMemory()
        self._sample_seconds: float | None = None  # how often the launcher wants to hear of steps
        self._sample_at = self._look_at = 0.0
        self._look_seconds = 0.0  # how often it wants to hear of a program that counts none
        self._signs: SignsOfLife | None = None
        self._told_progress: list[int] | None = None
        self._told_steps: int | None = None  # that the launcher knows of; None: it wants none
        self._memory: dict[str, int] = {}
        self._keyboard: Keyboard | None = None
        self._files: ProgramFiles | None = None
        self._parts: Iterator[bytes] = iter(())  # of them, that are not sent
        self._given: GivenFile | None = None
        self._spans = ""  # what the paths of the program's files of spans begin with
        self._lease: Lease | None = None  # for all instances of the job on this host
        self._seconds_after_exception = LEAST_SECONDS_AFTER_EXCEPTION
        # Kills the program if it lives on after an exception has ended its main thread.
        self._failed = GracefulStop(ask=lambda: None, force=self._kill_failed)
        self._was_kept = False  # whether the program lived on, and was killed for it
        self._paused: list[int] = []  # processes of the program that we stopped
        self._shared = shared
        self._folders: list[JobFolder] = []  # of the job on this host

    def run(self) -> int:
        """Carry the program from start to end and return what mpirun is told."""
        process_control.become_subreaper()
        self._hello()
        # While the others start.
        self._folders = launcher_channel.hold_folders(os.environ["POPRUN_CONTROL"], self._shared)
        self._keep_daemon()  # while other instances start
        start = self._wait_for_go()
        if "keyboard" in start:
            self._prepare_keyboard(start["keyboard"])
        for name, value in start["variables"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        launcher_channel.set_other_names()
        launcher_channel.drop_empty()
        launcher_channel.share_memory_in(self._folders)
        launcher_channel.name_folder(self._folders)
        self._sample_seconds = start.get("sample_seconds")
        self._look_seconds = start.get("look_seconds", 0.0)
        self._leftover_seconds = grace = start.get("grace_seconds", 0.0)
        self._seconds_after_exception = max(grace, LEAST_SECONDS_AFTER_EXCEPTION)
        self._told_steps = 0 if start.get("steps") else None
        if "open_files" in start:
            process_control.set_open_files(tuple(start["open_files"]))
        os.environ.update(program_environment.variables(os.environ))
        os.environ.update(self._vitals.variables(self._program, os.environ))
        if "files" in start:
            self._keep_files(start["files"])
        if "spans" in start:
            self._spans = start["spans"] or (self._files.prefix if self._files else "")
        if self._keyboard is not None:
            os.environ.update(self._keyboard.variables())
        self._memory = memory_state()
        wake = self._install_signals()
        self._start()
        self._send(
            control_protocol.STARTED,
            {
                "pid": self._pid,
                "bound": self._bound,
                "found": binding.read_back(self._pid),
                **self._daemon,
            },
        )
        self._end_unstarted()
        for kind, payload in self._early:
            self._handle(kind, payload)
        self._sweep()
        code = self._loop(wake)
        self._give_back()
        self._channel.close()
        if self._connected:
            # The launcher knows, and ends the job in good order: mpirun has nothing to clean up.
            return 0
        return code if code >= 0 else 128 - code

    # --- conversation ---------------------------------------------------------------------

    def _send(self, kind: bytes, value: "Any") -> None:
        self._queue(kind, dumps(value).encode())

    def _queue(self, kind: bytes, payload: bytes) -> None:
        if self._connected:
            self._unsent += control_protocol.pack(kind, payload)

    def _hello(self) -> None:
        rank = launcher_channel.rank()
        hello = {
            "token": self._token,
            "rank": rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time_ns": time.time_ns(),
        }
        if rank == 0:
            hello["port"] = launcher_channel.free_port()
        self._channel.sendall(control_protocol.pack(control_protocol.HELLO, dumps(hello).encode()))

    def _keep_daemon(self) -> None:
        """Have MPI's daemon on this host, our parent, listen on the network of the job alone."""
        network = os.environ.get("POPDIST_NETWORK")
        if not network or not launcher_channel.is_first_elsewhere(self._channel):
            return
        try:
            # Only the first instance on another host than the launcher's pays for it.
            self._daemon["daemon_ports"] = program_environment.lent_sockets().move_of(
                os.getppid(), network
            )
        except OSError as error:
            self._daemon["daemon_problem"] = str(error.strerror)

    def _wait_for_go(self) -> "dict[str, Any]":
        """Block until the launcher has heard from every instance and lets the program start."""
        while True:
            data = self._channel.recv(_CHUNK)
            if not data:
                sys.exit(1)
            messages = self._reader.feed(data)
            for number, (kind, payload) in enumerate(messages, start=1):
                if kind == control_protocol.GO:
                    self._early = messages[number:]
                    start: dict[str, Any] = loads(payload)
                    return start
                if kind == control_protocol.LEASE:
                    self._take_lease(loads(payload))
                if kind == control_protocol.INPUT_FILE:
                    self._take_given(payload)
                if kind in (control_protocol.STOP, control_protocol.BYE):
                    sys.exit(1)

    def _take_lease(self, request: "dict[str, Any]") -> None:
        # Only the first instance on another host than the launcher's pays for it.
        from poprun_py.machines.leases import take_for_launcher

        answer, self._lease = take_for_launcher(request, os.environ)
        self._channel.sendall(
            control_protocol.pack(control_protocol.LEASED, dumps(answer).encode())
        )

    def _take_given(self, part: bytes) -> None:
        # Only functions that are called on other hosts than the launcher's pay for it.
        from poprun_py.instance.transferred_files import GivenFile

        if self._given is None:
            self._given = GivenFile()
        if part:
            self._given.add(part)
        else:
            answer = dumps(self._given.answer()).encode()
            self._channel.sendall(control_protocol.pack(control_protocol.INPUT_FILE, answer))

    def _give_back(self) -> None:
        if self._lease is not None:
            self._lease.close()
        for folder in self._folders:
            folder.leave(_DYING_SECONDS if self._is_launcher_lost else 0.0)

    def _sweep(self) -> None:
        """Remove what dead jobs have left on this host; the launcher looks on its own."""
        if self._shared and os.environ.get("LOCAL_RANK", "0") == "0":
            job_folders.remove_abandoned(job_folders.folder_locations())

    def _handle(self, kind: bytes, payload: bytes) -> None:
        if kind == control_protocol.SIGNAL:
            self._signal_program(loads(payload))
        elif kind == control_protocol.PROPOSE_STOP:
            proposal = loads(payload)
            polls = self._vitals.propose(proposal)
            self._send(control_protocol.POLLED, {"proposal": proposal, "polls": polls})
        elif kind == control_protocol.AGREE_STOP:
            self._vitals.agree(loads(payload))
        elif kind in (
            control_protocol.DUMP_STACKS,
            control_protocol.OBSERVE,
            control_protocol.ASK_CLOCK,
        ):
            self._answer(kind, payload)
        elif kind == control_protocol.PAUSE:
            self._pause(loads(payload))
        elif kind == control_protocol.STOP:
            self._stop(*loads(payload))
        elif kind == control_protocol.BYE:
            self._released = True
        elif self._keyboard is not None:
            self._keyboard.handle(kind, payload)
            self._output.add_terminal(self._keyboard.terminal)

    def _answer(self, kind: bytes, payload: bytes) -> None:
        """Answer a question of the launcher."""
        if kind == control_protocol.DUMP_STACKS:
            self._send(control_protocol.STACKS, {"processes": self._vitals.stacks(self._pid)})
        elif kind == control_protocol.OBSERVE:
            self._observe()
        else:
            self._send(control_protocol.CLOCK, [loads(payload), time.monotonic_ns()])

    def _keep_files(self, told: "dict[str, str]") -> None:
        # Only jobs of several hosts whose programs leave files pay for it.
        from poprun_py.instance.transferred_files import ProgramFiles

        self._files = ProgramFiles(told)
        os.environ.update(self._files.variables())

    def _note_end(self, prefix: str) -> None:
        # Only jobs with a timeline pay for it.
        from poprun_py.instance.transferred_files import note_end

        note_end(prefix)

    # --- the program ----------------------------------------------------------------------

    def _prepare_keyboard(self, setup: "dict[str, Any]") -> None:
        from poprun_py.instance.keyboard import Keyboard  # only jobs at a terminal pay for it

        self._keyboard = Keyboard(setup, self._vitals, self._send)
        if self._keyboard.terminal is not None:
            # The terminal says how large it is now.
            for name in ("COLUMNS", "LINES"):
                os.environ.pop(name, None)

    def _start(self) -> None:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        # Closed by a successful exec; else it brings the reason.
        report_read, report_write = os.pipe()
        parent = os.getpid()
        self._bound = _bind()
        self._started_ns = time.monotonic_ns()
        try:
            pid = os.fork()
        except OSError as error:  # there are too many processes
            os.write(report_write, f"{self._program[0]}: {error.strerror}".encode(errors="replace"))
        else:
            if pid == 0:
                try:
                    self._become_program(parent, out_write, err_write, report_write)
                finally:
                    os._exit(_NOT_EXECUTABLE)
            self._pid = pid
        for descriptor in (out_write, err_write, report_write):
            os.close(descriptor)
        if self._given is not None:
            self._given.close()
        self._exec_error = os.read(report_read, 4096).decode(errors="replace")
        os.close(report_read)
        self._output.add_pipe(out_read, control_protocol.STDOUT)
        self._output.add_pipe(err_read, control_protocol.STDERR)
        if self._keyboard is not None:
            self._keyboard.started()
            self._output.add_terminal(self._keyboard.terminal)

    def _end_unstarted(self) -> None:
        """Tell of a program that there was no process for."""
        if not self._pid:
            import resource

            self._program_ended(_NOT_EXECUTABLE << 8, resource.getrusage(resource.RUSAGE_CHILDREN))

    def _become_program(self, parent: int, out: int, err: int, report: int) -> "NoReturn":
        """In the child: own process group, die with the wrapper, output into the pipes, exec."""
        if self._keyboard is not None:
            out, err = self._keyboard.become_stdio(out, err)
        else:
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        process_control.die_with_parent(parent)
        launcher_channel.take_stdin()
        os.dup2(out, 1)
        os.dup2(err, 2)
        self._channel.close()
        _replace(self._program, report)

    def _signal_program(self, number: int) -> None:
        if self._outcome is None and self._pid:
            process_control.signal_group(self._pid, number)
        elif self._outcome is not None and number in (signal.SIGTERM, signal.SIGINT):
            for pid in process_info.descendants(os.getpid()):
                process_control.signal_process(pid, number)

    def _stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Ask the program to end by a signal; kill what is left after ``grace`` seconds."""
        self._pause(False)
        self._stop_signal = number
        self._steps.begin(time.monotonic(), grace)

    def _pause(self, paused: bool) -> None:
        """Stop all processes of the program, or let those go on."""
        if paused:
            self._paused = process_control.stop_descendants(os.getpid())
            self._send(control_protocol.PAUSED, None)
            return
        for pid in self._paused:
            process_control.signal_process(pid, signal.SIGCONT)
        self._paused.clear()

    def _kill_tree(self) -> None:
        """Kill what is left of the program and of all that it has started."""
        if self._outcome is None:
            process_control.signal_group(self._pid, signal.SIGKILL)
        left = process_info.descendants(os.getpid())
        if self._outcome is not None and self._outcome["code"] in GOOD_CODES:
            self._tell_of_left(left)
        for pid in left:
            process_control.signal_process(pid, signal.SIGKILL)

    def _tell_of_left(self, pids: list[int]) -> None:
        """Tell the launcher which processes are killed; name each of them only once."""
        named = [
            [pid, process_info.command_line(pid)] for pid in pids if pid not in self._told_left
        ]
        self._told_left.update(pids)
        if named:
            self._send(control_protocol.LEFTOVERS, named)

    def _install_signals(self) -> int:
        """Turn signals into bytes on a pipe; returns its reading end."""
        wake, write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        return wake

    def _on_signals(self, numbers: "Iterable[int]") -> None:
        for number in numbers:
            if number in _ENDING:
                # mpirun ends the job, and kills this process a quarter of a second later. Without
                # a launcher nobody else would then end what the program has started.
                if self._outcome is None:
                    self._send(control_protocol.STOP_SIGNAL, number)
                self._stop(UNLIMITED_GRACE_SECONDS if self._connected else 0.0)
            elif number != signal.SIGCHLD:
                self._signal_program(number)

    def _reap(self) -> None:
        """Collect ended children: the program itself, and orphans that fell to this process."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._program_ended(status, usage)

    def _limit_failed(self) -> None:
        """Give the program the grace time to end if an exception has ended its main thread.

        Before it ends, Python waits for threads and pools, and the other instances wait for it.
        """
        has_failed = self._pid > 0 and self._vitals.failed_process() == self._pid
        if has_failed and self._failed.asked_at is None:
            self._failed.begin(time.monotonic(), self._seconds_after_exception)

    def _kill_failed(self) -> None:
        """Kill a program that its threads or pools keep from ending after an exception."""
        if self._outcome is None and self._steps.asked_at is None:
            self._was_kept = True
            self._queue(
                control_protocol.STDERR, _KEPT.format(f"{self._seconds_after_exception:g}").encode()
            )
            self._kill_tree()

    def _program_ended(self, status: int, usage: "struct_rusage") -> None:
        """Tell the launcher at once: a failure is to end the whole job."""
        if self._spans:
            self._note_end(self._spans)
        now = memory_state()
        code = os.waitstatus_to_exitcode(status)
        self._outcome = {
            # Python itself ends with 1 after an exception.
            "code": 1 if self._was_kept and code == -signal.SIGKILL else code,
            "time_ns": time.time_ns(),
            "max_rss_bytes": usage.ru_maxrss * 1024,
            "memory_limit_bytes": now.get("limit_bytes"),
            "oom_kills": now.get("oom_kills", 0) - self._memory.get("oom_kills", 0),
            "progress": self._vitals.progress(),
            "call": None if self._vitals.counts_steps() else self._vitals.call(),
            "polls": self._vitals.polls(),
            "trained_alone": self._vitals.trained_alone(),
            "started": self._started_ns,
            "now": time.monotonic_ns(),
            "ledger": self._vitals.ledger(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "stopped": self._steps.asked_at is not None,
            "exec_error": self._exec_error,
        }
        if self._keyboard is not None:
            self._keyboard.ended()
        # With the last steps: the memory that they are counted in is ours.
        self._send(control_protocol.PROGRAM_ENDED, {**self._outcome, **self._new_steps()})
        is_good = self._outcome["code"] in GOOD_CODES
        limit = self._leftover_seconds if is_good else LEFTOVER_SECONDS_AFTER_FAILURE
        self._steps.force_after(limit, time.monotonic())

    def _sample(self) -> None:
        """Tell the launcher how far the program is, if it asked for that and it has changed.

        If the program makes no steps for a while, tell what else moves in it.
        """
        if self._sample_seconds is None or self._outcome is not None:
            return
        now = time.monotonic()
        if now < self._sample_at:
            return
        self._sample_at = now + self._sample_seconds
        if self._vitals.counts_steps():
            progress = self._vitals.progress()
            if progress != self._told_progress:
                self._told_progress = progress
                self._look_at = now + self._look_seconds
                self._send(control_protocol.PROGRESS, progress)
        if now >= self._look_at:
            self._look_at = now + self._look_seconds
            self._look()

    def _look(self) -> None:
        if self._signs is None:
            from poprun_py.instance.program_activity import SignsOfLife  # once the program runs

            self._signs = SignsOfLife(self._vitals, self._pid)
        self._send(control_protocol.ACTIVITY, self._signs.look(self._output.num_bytes))

    def _observe(self) -> None:
        """Tell the launcher where the program's time goes and what it uses."""
        from poprun_py.instance.program_activity import observe  # once the program runs

        if self._outcome is None:
            found = {**observe(self._pid), "progress": self._vitals.progress()}
            times = {"started": self._started_ns, "now": time.monotonic_ns()}
            found["ledger"] = self._vitals.ledger()
            self._send(control_protocol.OBSERVED, {**found, **times, **self._new_steps()})

    def _new_steps(self) -> "dict[str, Any]":
        """Return the steps since the last time, if the launcher wants them, each once."""
        if self._told_steps is None:
            return {}
        steps = self._vitals.steps(self._told_steps)
        self._told_steps = steps["made"]
        return {"steps": steps}

    # --- the loop -------------------------------------------------------------------------

    def _loop(self, wake: int) -> int:
        """Move bytes until the program has ended, its output is sent and the launcher lets go.

        Returns:
            The program's code; negative for a signal.
        """
        channel: int | None = self._channel.fileno()
        self._channel.setblocking(False)
        reported = False
        while True:
            self._reap()
            self._limit_failed()
            self._failed.on_time(time.monotonic())
            self._steps.on_time(time.monotonic())
            if self._keyboard is not None:
                self._keyboard.on_time(time.monotonic())
            self._sample()
            if self._tree_is_empty() and not reported:
                reported = self._report_end()
            may_leave = self._released or time.monotonic() >= self._leave_at
            if reported and not self._unsent and may_leave and self._outcome is not None:
                # Not before: MPICH would end the others if this one left without MPI_Finalize.
                return self._leave(self._outcome["code"])
            for descriptor, event in self._events(wake, channel, reported):
                if descriptor == wake:
                    self._on_signals(os.read(wake, 512))
                elif self._keyboard is not None and descriptor == self._keyboard.requests:
                    self._keyboard.read_requests()
                elif descriptor in self._output.descriptors:
                    self._output.pump(descriptor)
                elif not self._converse(event):
                    channel = None
                    self._launcher_gone()

    def _leave(self, code: int) -> int:
        """Do what is left to do when nothing of the program is there; returns its code."""
        if not self._connected:
            process_control.end_daemon_of_mpi()
        return code

    def _events(self, wake: int, channel: int | None, reported: bool) -> list[tuple[int, int]]:
        """Wait for what can be read or written now."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if channel is not None:
            poll.register(channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if self._keyboard is not None and self._keyboard.requests >= 0:
            poll.register(self._keyboard.requests, select.POLLIN)
        if len(self._unsent) < _MAX_UNSENT:
            for descriptor in self._output.descriptors:
                poll.register(descriptor, select.POLLIN)
        return poll.poll(self._patience(reported))

    def _tree_is_empty(self) -> bool:
        """Tell whether the program, its output and everything that it left behind have ended."""
        return (
            self._outcome is not None
            and not self._output.descriptors
            and not process_info.has_children(os.getpid())
        )

    def _report_end(self) -> bool:
        """Send what is left, and then how the program ended; whether that was all.

        Files may be larger than memory: their parts wait on the disk for the channel.
        """
        if self._files is not None:
            self._parts, self._files = self._files.parts(), None
        while len(self._unsent) < _MAX_UNSENT:
            part = next(self._parts, None)
            if part is None:
                self._send(control_protocol.INSTANCE_ENDED, self._outcome)
                self._limit_stay()
                return True
            self._queue(control_protocol.FILE, part)
        return False

    def _limit_stay(self) -> None:
        """Set when to leave, so that Open MPI sees a program that ended without MPI_Finalize.

        Open MPI notices that when this process ends, and then ends the instances that wait for the
        program. A wrapper that leases cores for its host stays.
        """
        is_open_mpi = "PMIX_RANK" in os.environ and "PMI_RANK" not in os.environ
        has_ended_well = self._outcome is not None and self._outcome["code"] == 0
        if has_ended_well and is_open_mpi and self._lease is None:
            self._leave_at = time.monotonic() + LEAVE_SECONDS

    def _patience(self, reported: bool) -> int | None:
        """Return the milliseconds until something has to be looked at without an event."""
        if self._outcome is not None and not reported:
            return 20
        kills_at = min(self._steps.next_deadline(), self._failed.next_deadline())
        deadline = min(kills_at, self._leave_at)
        if self._keyboard is not None:
            deadline = min(deadline, self._keyboard.next_deadline())
        if self._sample_seconds is not None and self._outcome is None:
            deadline = min(deadline, self._sample_at)
        if deadline == float("inf"):
            return None
        return max(1, int(1000 * (deadline - time.monotonic())))

    def _converse(self, event: int) -> bool:
        """Send and receive on the channel; False when the launcher is gone."""
        try:
            if event & select.POLLOUT and self._unsent:
                del self._unsent[: self._channel.send(self._unsent)]
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = self._channel.recv(_CHUNK)
                if not data:
                    return False
                for kind, payload in self._reader.feed(data):
                    self._handle(kind, payload)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _launcher_gone(self) -> None:
        """End the program, whose output is still read, so that it can end, and dropped."""
        self._connected = False
        self._released = self._is_launcher_lost = True
        self._unsent.clear()
        if self._files is not None:
            self._files.remove()
        self._stop(ORPHAN_GRACE_SECONDS)
