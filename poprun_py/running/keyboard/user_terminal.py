"""The user's terminal, and the modes (flags and control characters) of terminals.

The kernel suspends a background process that reads or sets its terminal, so the launcher reads and
sets the terminal only in the foreground. If another foreground program, such as the pager in
``poprun-py ... | less``, has set the terminal's modes, the launcher leaves the terminal to that
program.
"""

from __future__ import annotations

import contextlib
import os
import termios
from dataclasses import dataclass, replace
from typing import Any

from poprun_py.process_info import all_stats

_CHUNK = 4096
_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
# The terminal flags that a shell sets before it starts a program. While the user edits a command
# line, a shell clears some of these flags.
_SANE_IFLAG = termios.ICRNL
_SANE_OFLAG = termios.OPOST | termios.ONLCR
_SANE_LFLAG = termios.ICANON | termios.ECHO | termios.ECHOE | termios.ISIG | termios.IEXTEN
_FEWEST_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class Modes:
    """The flags and control characters of a terminal."""

    iflag: int
    oflag: int
    lflag: int
    codes: tuple[int, ...]

    @classmethod
    def of(cls, attributes: list[Any]) -> Modes:
        """Create terminal modes from the result of ``termios.tcgetattr``."""
        codes = (code if isinstance(code, int) else code[0] for code in attributes[_CC])
        return cls(attributes[_IFLAG], attributes[_OFLAG], attributes[_LFLAG], tuple(codes))

    def put_into(self, attributes: list[Any]) -> list[Any]:
        """Return a copy of terminal attributes with these modes, for ``termios.tcsetattr``."""
        changed = list(attributes)
        changed[_IFLAG], changed[_OFLAG], changed[_LFLAG] = self.iflag, self.oflag, self.lflag
        changed[_CC] = [bytes([code]) for code in self.codes]
        return changed

    @property
    def is_canonical(self) -> bool:
        """Whether programs that read the terminal receive whole lines, not single keys."""
        return bool(self.lflag & termios.ICANON)

    @property
    def is_plain(self) -> bool:
        """Whether programs receive whole lines and typed text is echoed, as is usual."""
        return self.is_canonical and bool(self.lflag & termios.ECHO)

    @property
    def echoes_newline(self) -> bool:
        """Whether the terminal moves the cursor to the next line after the Enter key."""
        return self.is_canonical and bool(self.lflag & (termios.ECHO | termios.ECHONL))

    @property
    def maps_newlines(self) -> bool:
        """Whether a newline in output also moves the cursor to the first column."""
        return bool(self.oflag & termios.OPOST and self.oflag & termios.ONLCR)

    def sane(self) -> Modes:
        """Return the terminal modes that a shell sets before it starts a program."""
        return replace(
            self,
            iflag=self.iflag | _SANE_IFLAG,
            oflag=self.oflag | _SANE_OFLAG,
            lflag=self.lflag | _SANE_LFLAG,
        )

    def with_changes(self, before: Modes, after: Modes) -> Modes:
        """Return these terminal modes, changed where ``after`` differs from ``before``.

        If a program has restored its own terminal, the user's terminal therefore stays unchanged.
        """
        codes = [
            theirs if theirs != first else own
            for own, first, theirs in zip(self.codes, before.codes, after.codes, strict=True)
        ]
        iflag, oflag, lflag = (
            _with_changed_bits(getattr(self, flag), getattr(before, flag), getattr(after, flag))
            for flag in ("iflag", "oflag", "lflag")
        )
        if not lflag & termios.ICANON:
            # The launcher must receive each key immediately, even if the program waits for several
            # keys.
            codes[termios.VMIN], codes[termios.VTIME] = 1, 0
        return Modes(iflag, oflag, lflag, tuple(codes))


def _with_changed_bits(own: int, before: int, after: int) -> int:
    changed = before ^ after
    return own & ~changed | after & changed


def window(size: tuple[int, int], tag_width: int) -> list[int]:
    """Return a terminal's rows, and its columns minus the width of the tag before each line."""
    rows, columns = size
    # If the terminal's size is unknown, rows and columns are 0.
    left = max(columns - tag_width, min(columns, _FEWEST_COLUMNS))
    return [rows, left]


class UserTerminal:
    """The user's terminal, if the launcher's standard input is this terminal.

    Attributes:
        own_modes: The terminal's modes without the changes that the job's programs have made.
        modes: The current modes of the terminal.
        first_modes: The terminal modes with which the job's programs start.

    Raises:
        OSError: Standard input is not the controlling terminal of this process.
    """

    def __init__(self) -> None:
        os.tcgetpgrp(0)
        # If another process has read the typed keys first, a read must not block. A newly opened
        # descriptor can be non-blocking without effect on the descriptors of other processes.
        self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        self._attributes = termios.tcgetattr(self._descriptor)
        now = Modes.of(self._attributes)
        self._is_in_foreground = self._has_foreground()
        is_changed = not now.is_plain and (not self._is_in_foreground or _has_other_group_members())
        self.own_modes = self.modes = self.first_modes = now.sane() if is_changed else now

    def may_use(self) -> bool:
        """Return whether the launcher may read the terminal and set its modes now."""
        if not self._has_foreground():
            return False
        try:
            now = Modes.of(termios.tcgetattr(self._descriptor))
        except termios.error:
            return False
        if now == self.modes:
            return True
        if now.is_plain and self.modes == self.own_modes:
            # Another program has restored the terminal's modes, or the user has changed them.
            self.own_modes = self.modes = now
            return True
        return False

    def fileno(self) -> int:
        """Return the terminal's file descriptor, which becomes readable when the user types."""
        return self._descriptor

    def close(self) -> None:
        """Restore the terminal's modes and close its file descriptor."""
        self.restore()
        os.close(self._descriptor)

    def has_come_to_foreground(self) -> bool:
        """Return whether the launcher came to the foreground since the last call of this method."""
        was_in_foreground, self._is_in_foreground = self._is_in_foreground, self._has_foreground()
        if was_in_foreground or not self._is_in_foreground:
            return False
        with contextlib.suppress(termios.error):
            # While the launcher was in the background, the shell may have changed the modes.
            self._attributes = termios.tcgetattr(self._descriptor)
            now = Modes.of(self._attributes)
            self.own_modes = self.modes = now if now.is_plain else self.own_modes
        return True

    def window(self, tag_width: int) -> list[int]:
        """Return the terminal's rows, and its columns minus the width of a tag; 0 if unknown."""
        try:
            size: tuple[int, int] = termios.tcgetwinsize(self._descriptor)
        except (OSError, termios.error):
            size = (0, 0)
        return window(size, tag_width)

    def read(self) -> bytes | None:
        """Return typed keys; b"" at the end of input, None if nothing can be read now."""
        if not self.may_use():
            return None
        try:
            return os.read(self._descriptor, _CHUNK)
        except OSError:
            return None

    def follow(self, modes: list[Any] | None, *, drop_input: bool = False) -> None:
        """Set the terminal to the modes of a program, or to its original modes if None is given."""
        wanted = self.own_modes
        if modes is not None:
            iflag, oflag, lflag, codes = modes
            changed = Modes(iflag, oflag, lflag, tuple(codes))
            wanted = wanted.with_changes(self.first_modes, changed)
        self.set(wanted, drop_input=drop_input)

    def set(self, modes: Modes, *, drop_input: bool = False) -> None:
        """Set the terminal's modes if the launcher may use the terminal now."""
        if not self.may_use():
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
        """Restore the terminal's original modes before the launcher is suspended or ends."""
        self.set(self.own_modes)
        self._is_in_foreground = False

    def _has_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False


def _has_other_group_members() -> bool:
    """Return whether the process group contains more than this process and its ancestors."""
    group = os.getpgrp()
    parents, members = {}, []
    for pid, stat in all_stats():
        parents[pid] = stat.parent
        if stat.group == group:
            members.append(pid)
    ancestors, pid = set(), os.getpid()
    while pid:
        ancestors.add(pid)
        pid = parents.get(pid, 0)
    return not ancestors.issuperset(members)
