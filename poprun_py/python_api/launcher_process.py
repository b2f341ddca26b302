"""The process in which the launcher of one job runs: it gets its order over the channel.

Started by file, so that no module of the program's folder is in the way: python -P FILE DESCRIPTOR.
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

from poprun_py.instance.job_folders import JobFolder  # noqa: E402 (found from here on)
from poprun_py.python_api.channel import Channel  # noqa: E402
from poprun_py.running.supervise.caught_signals import HANGUP_ONCE, INTERRUPT_ONCE  # noqa: E402

_NAMED = {INTERRUPT_ONCE: signal.SIGINT, HANGUP_ONCE: signal.SIGHUP}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_NAMED)


class _Stopped(KeyboardInterrupt):
    """A signal asked for the end while no program ran that could be asked to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(_NAMED.get(number, number))


def _stop(number: int, _: FrameType | None) -> NoReturn:
    _ignore_signals()  # one is enough: what it interrupts is not to be interrupted again
    raise _Stopped(number)


def main() -> NoReturn:
    """Launch one job, and say how it ended."""
    channel = Channel.inherited(int(sys.argv[1]))
    folder: JobFolder | None = None
    kind, value = "", None
    try:
        _catch_signals()
        if message := channel.receive():
            order = message[1]
            if order.folder is not None:
                folder = JobFolder.join(order.folder)
            channel.signal_end(HANGUP_ONCE)
            if channel.is_closed:  # before the kernel was asked
                raise _Stopped(HANGUP_ONCE)
            from poprun_py.python_api.running import run_order

            kind, value = run_order(order, channel)
    except _Stopped as stopped:
        from poprun_py.python_api.running import stopped_result

        kind, value = "result", stopped_result(stopped.signal)
    _ignore_signals()  # nothing is left to be stopped
    if kind:
        channel.send(kind, value)
    if folder is not None and channel.is_closed:
        folder.remove()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Finalising the interpreter would take longer than everything else that is left to do.
    os._exit(0)


def _catch_signals() -> None:
    """Have signals end this process in good order; until here the starter has kept them back."""
    gc.disable()  # what is made before the job starts lives until the end
    for number in _ENDING:
        if number in _NAMED or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _ignore_signals() -> None:
    # Not SIG_IGN: of a signal that came just before, Python would complain on stderr.
    for number in _ENDING:
        signal.signal(number, lambda *_: None)


if __name__ == "__main__":
    main()
