"""What a program writes: read from its pipes, and from its terminal if it has one, as frames.

Standard library only and cheap to import: it runs in front of every program. Nothing here knows
where the frames go.
"""

import os

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from poprun_py.instance.program_input import ProgramTerminal

_CHUNK = 1 << 16


class ProgramOutput:
    """The open ends of what one program writes to.

    Args:
        queue: takes the kind of a frame, and what was written.
    """

    def __init__(self, queue: "Callable[[bytes, bytes], None]") -> None:
        self._queue = queue
        self._kinds: dict[int, bytes] = {}  # of frames, by descriptor
        self._terminal: ProgramTerminal | None = None
        self.num_bytes = 0  # written by now

    @property
    def descriptors(self) -> "Collection[int]":
        """Where more may come; none at the end."""
        return self._kinds

    def add_pipe(self, descriptor: int, kind: bytes) -> None:
        """Read this pipe from now on."""
        os.set_blocking(descriptor, False)
        self._kinds[descriptor] = kind

    def add_terminal(self, terminal: "ProgramTerminal | None") -> None:
        """Read this terminal from now on, unless that was said before."""
        if terminal is not None and terminal is not self._terminal:
            self._terminal = terminal
            self._kinds.update(terminal.streams)

    def pump(self, descriptor: int) -> None:
        """Pass on what was written there."""
        if self._terminal is None or self._terminal.master not in self._kinds:
            self._take(descriptor, self._read(descriptor))
            return
        # A prompt comes last: what is on stderr by now was written before it.
        master = self._terminal.master
        written = self._read(master)
        lines, newline, prompt = (written or b"").rpartition(b"\n")
        self._take(master, lines + newline or None)
        for other in [each for each in self._kinds if each != master]:
            self._take(other, self._read(other))
        self._take(master, (prompt or None) if written else written)

    def _read(self, descriptor: int) -> bytes | None:
        """Return what was written; None for nothing by now, empty at the end."""
        if self._terminal is not None and descriptor in self._terminal.ptys:
            return self._terminal.ptys[descriptor].read()
        try:
            return os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None

    def _take(self, descriptor: int, data: bytes | None) -> None:
        """Pass on what was written; empty, nothing more is."""
        if data:
            self.num_bytes += len(data)
            self._queue(self._kinds[descriptor], data)
        elif data is not None:
            del self._kinds[descriptor]
            if self._terminal is not None and descriptor in self._terminal.ptys:
                self._terminal.ptys[descriptor].close()
            else:
                os.close(descriptor)
