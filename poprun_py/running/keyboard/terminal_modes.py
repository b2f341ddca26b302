"""The modes of terminals as values: how the user's follow those that a program sets for its own.

Nothing here acts on a terminal: user_terminal.py does.
"""

from __future__ import annotations

import termios
from dataclasses import dataclass, replace
from typing import Any

_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
# A shell that edits its command line leaves these as it needs them; programs start with these.
_SANE_IFLAG = termios.ICRNL
_SANE_OFLAG = termios.OPOST | termios.ONLCR
_SANE_LFLAG = termios.ICANON | termios.ECHO | termios.ECHOE | termios.ISIG | termios.IEXTEN
_FEWEST_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class Modes:
    """The flags and control characters that a program can set for its terminal."""

    iflag: int
    oflag: int
    lflag: int
    codes: tuple[int, ...]

    @classmethod
    def of(cls, attributes: list[Any]) -> Modes:
        """Read what ``termios.tcgetattr`` returned."""
        codes = (code if isinstance(code, int) else code[0] for code in attributes[_CC])
        return cls(attributes[_IFLAG], attributes[_OFLAG], attributes[_LFLAG], tuple(codes))

    def put_into(self, attributes: list[Any]) -> list[Any]:
        """Return attributes for ``termios.tcsetattr``: these modes, and the rest as it was."""
        changed = list(attributes)
        changed[_IFLAG], changed[_OFLAG], changed[_LFLAG] = self.iflag, self.oflag, self.lflag
        changed[_CC] = [bytes([code]) for code in self.codes]
        return changed

    def to_json(self) -> list[object]:
        """Return them for the control channel."""
        return [self.iflag, self.oflag, self.lflag, list(self.codes)]

    @property
    def is_canonical(self) -> bool:
        """Whether the terminal gives whole lines."""
        return bool(self.lflag & termios.ICANON)

    @property
    def is_plain(self) -> bool:
        """Whether the terminal gives whole lines and shows them: nobody has asked for more."""
        return self.is_canonical and bool(self.lflag & termios.ECHO)

    @property
    def echoes_newline(self) -> bool:
        """Whether the Enter key moves the cursor to the next line."""
        return self.is_canonical and bool(self.lflag & (termios.ECHO | termios.ECHONL))

    @property
    def maps_newlines(self) -> bool:
        """Whether a newline also returns to the first column."""
        return bool(self.oflag & termios.OPOST and self.oflag & termios.ONLCR)

    def sane(self) -> Modes:
        """Return what they are once no shell edits its command line."""
        return replace(
            self,
            iflag=self.iflag | _SANE_IFLAG,
            oflag=self.oflag | _SANE_OFLAG,
            lflag=self.lflag | _SANE_LFLAG,
        )

    def changed_as(self, before: Modes, after: Modes) -> Modes:
        """Return these with what differs between two others as it is in ``after``.

        So a program that has set its terminal back leaves the user's exactly as it was.
        """
        codes = [
            theirs if theirs != first else own
            for own, first, theirs in zip(self.codes, before.codes, after.codes, strict=True)
        ]
        lflag = _taken(self.lflag, before.lflag, after.lflag)
        if not lflag & termios.ICANON:
            # The launcher reads when there is something, whatever the program waits for.
            codes[termios.VMIN], codes[termios.VTIME] = 1, 0
        return Modes(
            _taken(self.iflag, before.iflag, after.iflag),
            _taken(self.oflag, before.oflag, after.oflag),
            lflag,
            tuple(codes),
        )


def _taken(own: int, before: int, after: int) -> int:
    """Return ``own`` with the bits that differ between two others as they are in ``after``."""
    changed = before ^ after
    return own & ~changed | after & changed


def window(size: tuple[int, int], tag_width: int) -> list[int]:
    """Return the (rows, columns) that are left to a program beside the tag of each line."""
    rows, columns = size
    # A terminal that does not say how large it is has neither.
    left = max(columns - tag_width, min(columns, _FEWEST_COLUMNS))
    return [rows, left]
