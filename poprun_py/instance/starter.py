"""The starter and the keepers, the parents of a wrapper in jobs with checkpoints in memory.

If mpirun ends, or loses a daemon or a host, MPI kills the processes that it has started. mpirun
therefore starts the starter, which forks the wrapper into a session of its own, in which MPI finds
no process. After the loss, only starters are gone, and the wrappers go on under the launcher.

Between the starter and the wrapper are keepers, each the parent of the next one. A keeper only
waits. If the wrapper is killed, its keeper adopts the spare, and becomes the wrapper of the next
programs.
"""

import os
import sys

from poprun_py import process_info
from poprun_py.instance import launcher_channel, process_control, program_environment
from poprun_py.instance.launcher_channel import LauncherChannel
from poprun_py.instance.prepared_python import PreparedPython
from poprun_py.instance.quick_imports import dumps, loads, signal, socket

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from typing import Any

# A wrapper can be killed this many times until mpirun has to start another one.
NUM_KEEPERS = 8
_IGNORED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
)
_END = b"end"
_MOST_BYTES = 1 << 18  # of a message with the environment of a spare
_INT_BYTES = 4  # the size of a file descriptor in a message of a Unix socket


class Keepers:
    """The connections of a wrapper to its keepers.

    Attributes:
        has_taken_over: Whether this process was a keeper, whose wrapper was killed.
        rank: The instance of the wrapper.
        spare: The spare of the killed wrapper; None without one.
        states_path: The path of the folder with the states of the training; empty if unknown.
    """

    def __init__(self) -> None:
        self.has_taken_over = False
        self.rank = program_environment.rank()
        self.spare: PreparedPython | None = None
        self.states_path = ""
        self._connections: list[socket.socket] = []
        self._told: tuple[int, str, int] | None = None

    def add(self, connection: "socket.socket") -> None:
        """In a child of a keeper, add the connection to this keeper."""
        self._connections.append(connection)

    def tell(self, rank: int, states_path: str, spare: PreparedPython | None) -> None:
        """Tell the keepers what they need to take over, if it has changed."""
        pid = 0 if spare is None else spare.pid
        if self._told == (rank, states_path, pid):
            return
        self._told = rank, states_path, pid
        has_spare = spare is not None and pid > 0
        message = {"rank": rank, "states_path": states_path, "pid": pid}
        rights = []
        if has_spare and spare is not None:
            message["environ"] = spare.environ
            descriptor = spare.descriptor.to_bytes(_INT_BYTES, sys.byteorder)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)]
        self._send(dumps(message).encode(), rights)

    def end(self) -> None:
        """Tell the keepers that the wrapper ends by itself."""
        self._send(_END, [])

    def _send(self, message: bytes, rights: "list[Any]") -> None:
        for each in self._connections:
            try:  # noqa: SIM105 (importing contextlib would take longer than this module)
                each.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                pass  # the keeper was killed or stopped, or the spare's environment is too large

    def keep(self, connection: "socket.socket", child: int) -> None:
        """In a keeper, wait until the wrapper is killed; exit if the wrapper ends by itself.

        The other end of ``connection`` is in the wrapper and in all processes between the wrapper
        and this keeper, of which ``child`` is the first.
        """
        last, descriptor = b"", -1
        while True:
            message, rights, _, _ = connection.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(_INT_BYTES))
            if message == _END:
                os.waitpid(child, 0)
                os._exit(0)
            if not message:
                break
            if descriptor >= 0:
                os.close(descriptor)
            last, descriptor = message, -1
            if rights:
                descriptor = int.from_bytes(rights[0][2][:_INT_BYTES], sys.byteorder)
                os.set_inheritable(descriptor, False)
        connection.close()
        self.has_taken_over = True
        if last:
            self._take(loads(last), descriptor)
        _kill_descendants(0 if self.spare is None else self.spare.pid)

    def _take(self, state: "dict[str, Any]", descriptor: int) -> None:
        self.rank, self.states_path = state["rank"], state["states_path"]
        if descriptor >= 0:
            self.spare = PreparedPython.adopt(state["pid"], state["environ"], descriptor)


def leave_mpirun(
    channel: LauncherChannel, address: str, token: str
) -> tuple[LauncherChannel, Keepers]:
    """Fork keepers and the wrapper; return in the wrapper and in each keeper that takes over.

    The starter, this process, ends after all of them.

    Args:
        channel: The connection to the launcher.
        address: The address of the launcher, to which a keeper connects.
        token: The secret of the connection.

    Returns:
        A pair: the connection of the process in which the function returns, and its keepers.
    """
    pid = os.fork()
    if pid:
        channel.close()
        _handle_signals(signal.SIG_IGN)
        os.waitpid(pid, 0)
        # mpirun must not see a failure, because it would kill the starters of other wrappers.
        os._exit(0)
    os.setsid()
    # MPI waits until all processes have closed the output of the starter.
    null = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(null, each)
    os.close(null)
    keepers = Keepers()
    for _ in range(NUM_KEEPERS):
        process_control.become_subreaper()
        connection, of_wrapper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            connection.close()
            keepers.add(of_wrapper)
            continue
        of_wrapper.close()
        channel.close()
        _handle_signals(signal.SIG_IGN)
        keepers.keep(connection, pid)
        _handle_signals(signal.SIG_DFL)
        return _connect(keepers, address, token), keepers
    return channel, keepers


def _connect(keepers: Keepers, address: str, token: str) -> LauncherChannel:
    """Connect a keeper that takes over to the launcher; exit if the launcher is gone."""
    try:
        return LauncherChannel(launcher_channel.connect(address, token))
    except (OSError, SystemExit):
        if keepers.spare is not None:
            keepers.spare.end()
        keepers.end()
        os._exit(1)


def _handle_signals(handler: "Any") -> None:
    for number in _IGNORED:
        signal.signal(number, handler)


def _kill_descendants(without: int) -> None:
    """Kill all processes that a killed wrapper has left, except the process ``without``."""
    killed = {without}
    while left := [pid for pid in process_info.descendants(os.getpid()) if pid not in killed]:
        killed.update(left)
        for pid in left:
            process_control.signal_process(pid, signal.SIGKILL)
