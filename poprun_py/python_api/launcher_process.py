"""The program of a launcher process: ``python -P launcher_process.py DESCRIPTOR``.

The program receives the request for a job from the descriptor, runs the job, and sends its result.
Python is given the path of this file, because a module in the user's folder could hide the package.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from poprun_py.instance.job_folders import JobFolder  # noqa: E402 (needs the changed sys.path)
from poprun_py.python_api.messages import Channel  # noqa: E402
from poprun_py.running.supervise.signal_pipe import ENDING, HANGUP_ONCE, ONCE  # noqa: E402

_ENDING_SIGNALS = (*ENDING, *ONCE)


class _Stopped(KeyboardInterrupt):
    """Raised when a signal asks the job to end before its programs run."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(ONCE.get(number, number))


def _stop(number: int, _: FrameType | None) -> NoReturn:
    _ignore_signals()  # a second signal must not interrupt the clean-up
    raise _Stopped(number)


def main() -> NoReturn:
    """Run one job and send its result."""
    channel = Channel.inherited(int(sys.argv[1]))
    folder: JobFolder | None = None
    try:
        _catch_signals()
        message = channel.receive()
        if message is None:
            os._exit(0)
        request = message[1]
        if request.folder is not None:
            folder = JobFolder.join(request.folder)
        channel.signal_end(HANGUP_ONCE)
        # The kernel sends no signal if the other end was closed before signal_end was called.
        if channel.is_closed:
            raise _Stopped(HANGUP_ONCE)
        from poprun_py.python_api.run_request import run_request

        kind, value = run_request(request, channel)
    except _Stopped as stopped:
        from poprun_py.python_api.run_request import stopped_result

        kind, value = "result", stopped_result(stopped.signal)
    _ignore_signals()  # A signal after the end of the job must not change its result.
    channel.send(kind, value)
    if folder is not None and channel.is_closed:
        folder.remove()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # os._exit skips the interpreter's own clean-up, which is slow.
    os._exit(0)


def _catch_signals() -> None:
    """Make signals that end a job raise _Stopped, and unblock them.

    The parent process has started this process with these signals blocked.
    """
    # Objects made before the job starts live until the job ends, so collecting garbage is useless.
    gc.disable()
    for number in _ENDING_SIGNALS:
        if number in ONCE or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def _ignore_signals() -> None:
    # The signals get an empty handler. With SIG_IGN, Python would print an error for a signal that
    # arrived just before this call.
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda *_: None)


if __name__ == "__main__":
    main()
