"""Programs that run in a fork of the test's process, which has imported torch already."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path


class ForkedProgram:
    """A running program: the ends of the pipes that it writes to, and its end."""

    def __init__(self, path: Path, *words: object) -> None:
        """Run the program of the file as Python runs a script, in a session of its own."""
        reading, writing = zip(os.pipe(), os.pipe(), strict=True)
        self.pid = os.fork()
        if not self.pid:
            try:
                for number, descriptor in enumerate(writing, 1):
                    os.dup2(descriptor, number)
                _become(path, words)
            finally:
                os._exit(1)
        for descriptor in writing:
            os.close(descriptor)
        self.stdout, self.stderr = (os.fdopen(descriptor) for descriptor in reading)
        self._code: int | None = None

    def wait(self) -> int:
        """Return the exit code; minus a signal's number if that ended the program."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        """End the program at once."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """End the program if it still runs, and close its pipes."""
        self.kill()
        self.stdout.close()
        self.stderr.close()


def _become(path: Path, words: tuple[object, ...]) -> None:
    os.setsid()
    # pytest's own streams keep what is written in memory.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = [str(path), *map(str, words)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
