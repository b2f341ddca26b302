"""The launcher's own terminal: reads keys, sets modes, and only while it is ours to do so.

A process in the background that reads or sets its terminal is stopped by the kernel. In the
foreground there may be others, such as the pager of ``poprun-py ... | less``: whoever has set the
modes of the terminal reads it, and nobody else.
"""

from __future__ import annotations

import contextlib
import os
import termios

from poprun_py.process_info import all_stats
from poprun_py.running.keyboard.terminal_modes import Modes

_CHUNK = 4096


class UserTerminal:
    """The terminal that is standard input; it stays as it is until ``set``.

    Raises:
        OSError: it does not control this process.
    """

    def __init__(self) -> None:
        os.tcgetpgrp(0)
        # Opened anew: a read must not wait when somebody else was quicker, and what is set for that
        # must not be seen by the others that have this terminal.
        self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        self._attributes = termios.tcgetattr(self._descriptor)
        now = Modes.of(self._attributes)
        self._is_in_front = self._has_foreground()
        is_others = not now.is_plain and (not self._is_in_front or _has_company())
        # As it was before a program changed it, and as we have set it.
        self.own_modes = self.modes = now.sane() if is_others else now

    @property
    def is_ours(self) -> bool:
        """Whether the launcher is in the foreground, and nobody else has set the terminal."""
        if not self._has_foreground():
            return False
        try:
            now = Modes.of(termios.tcgetattr(self._descriptor))
        except termios.error:
            return False
        if now == self.modes:
            return True
        if now.is_plain and self.modes == self.own_modes:
            # Set back by whoever had it, or changed by the user.
            self.own_modes = self.modes = now
            return True
        return False

    def fileno(self) -> int:
        """Return the descriptor that is readable when something was typed."""
        return self._descriptor

    def close(self) -> None:
        """Leave it as it was, for good."""
        self.restore()
        os.close(self._descriptor)

    def has_come(self) -> bool:
        """Tell whether the launcher has come to the foreground since the last question."""
        was_in_front, self._is_in_front = self._is_in_front, self._has_foreground()
        if was_in_front or not self._is_in_front:
            return False
        with contextlib.suppress(termios.error):
            # As the shell leaves it to us now.
            self._attributes = termios.tcgetattr(self._descriptor)
            now = Modes.of(self._attributes)
            self.own_modes = self.modes = now if now.is_plain else self.own_modes
        return True

    def size(self) -> tuple[int, int]:
        """Return its rows and columns."""
        try:
            size: tuple[int, int] = termios.tcgetwinsize(self._descriptor)
        except (OSError, termios.error):
            return (0, 0)
        return size

    def read(self) -> bytes | None:
        """Return what was typed; empty for the end of input, None if it is not ours to read."""
        if not self.is_ours:
            return None
        try:
            return os.read(self._descriptor, _CHUNK)
        except OSError:
            return None

    def set(self, modes: Modes, *, drop_input: bool = False) -> None:
        """Set its modes at once, if it is ours to set."""
        if not self.is_ours:
            return
        with contextlib.suppress(termios.error):
            if drop_input:
                termios.tcflush(self._descriptor, termios.TCIFLUSH)
            if modes != self.modes:
                termios.tcsetattr(
                    self._descriptor, termios.TCSANOW, modes.put_into(self._attributes)
                )
                self.modes = Modes.of(termios.tcgetattr(self._descriptor))

    def restore(self) -> None:
        """Leave it as it was; what the shell makes of it is looked at when we come back."""
        self.set(self.own_modes)
        self._is_in_front = False

    def _has_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False


def _has_company() -> bool:
    """Tell whether others than those that wait for us are in our process group."""
    ours = os.getpgrp()
    parents, members = {}, []
    for pid, stat in all_stats():
        parents[pid] = stat.parent
        if stat.group == ours:
            members.append(pid)
    waiting, pid = set(), os.getpid()
    while pid:
        waiting.add(pid)
        pid = parents.get(pid, 0)
    return not waiting.issuperset(members)
