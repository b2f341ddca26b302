"""The signals that the launcher receives, as events of the launcher's selector loop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from poprun_py.instance import process_control

# The kernel sends this signal when the launcher's parent process has ended. The signal is blocked
# between and after attempts at a job: the signal would end the launcher before the clean-up. If a
# launcher runs in an instance, the wrapper sends it SIGRTMAX - 3 and SIGRTMAX - 4
# (instance/python_stacks.py), so the launcher's own signals have other numbers.
PARENT_ENDED = signal.SIGRTMAX - 7
# Signals that pass on a SIGINT or SIGHUP, such as a Ctrl-C, that the launcher may have received
# itself. The launcher ignores such a signal if the end of the job was requested before.
INTERRUPT_ONCE = signal.SIGRTMAX - 5
HANGUP_ONCE = signal.SIGRTMAX - 6
ONCE = {INTERRUPT_ONCE: signal.SIGINT, HANGUP_ONCE: signal.SIGHUP}
# The signals that ask a job to end, besides the signals in ONCE.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The signals that ``hold_signals`` holds. Batch systems and a closed terminal send these signals.
HELD = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
_PARENT_HAS_ENDED = "the process that started the job has ended"


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Hold some signals while no ``SignalPipe`` is there, for the next one, or for a pause.

    Otherwise SIGTERM between two attempts would end the launcher, and the state of the training in
    memory would be lost. A signal after the last attempt has no effect, because the job has ended.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        late = [each for each in HELD if each not in before]
        while signal.sigtimedwait(late, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalPipe:
    """Turns signals into bytes of a pipe; closing ``resources`` restores the signal handlers."""

    def __init__(self, resources: contextlib.ExitStack) -> None:
        self._has_end_request = False
        self._read_end, write_end = os.pipe()
        for end in (self._read_end, write_end):
            resources.callback(os.close, end)
            os.set_blocking(end, False)
        numbers: list[int] = [
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGCHLD,
            signal.SIGQUIT,
            signal.SIGWINCH,
            signal.SIGCONT,  # the launcher may now be in the foreground
            *ONCE,
        ]
        for each in (signal.SIGTSTP, signal.SIGHUP):
            if signal.getsignal(each) != signal.SIG_IGN:
                numbers.append(each)
        self._parent = process_control.signal_when_parent_ends(PARENT_ENDED)
        if self._parent is not None:
            numbers.append(PARENT_ENDED)
        old_wake = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        resources.callback(signal.set_wakeup_fd, old_wake)
        for number in numbers:
            old_handler = signal.signal(number, lambda *_: None)
            resources.callback(signal.signal, number, old_handler)
        if self._parent is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {PARENT_ENDED})
            resources.callback(signal.pthread_sigmask, signal.SIG_BLOCK, {PARENT_ENDED})
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        resources.callback(self._hold_again, {each for each in HELD if each in before})

    def _hold_again(self, held: set[signal.Signals]) -> None:
        """Block the signals that were held before, and send those again that nobody has taken."""
        signal.pthread_sigmask(signal.SIG_BLOCK, held)
        with contextlib.suppress(BlockingIOError):
            for number in held.intersection(os.read(self._read_end, 512)):
                signal.raise_signal(number)

    def fileno(self) -> int:
        """Return the file descriptor that is readable after a signal has arrived."""
        return self._read_end

    def take(self) -> list[tuple[int, str]]:
        """Return the signals since the last call of this method, each as a number and a reason.

        The end of the parent process counts as SIGHUP and has a reason. Other reasons are empty.
        """
        taken: list[tuple[int, str]] = []
        # Signals of one event may arrive in any order, so the signals in ONCE are handled last.
        for number in sorted(os.read(self._read_end, 512), key=ONCE.__contains__):
            if number == PARENT_ENDED:
                # The kernel also sends this signal if only the thread that started the launcher has
                # ended, not the whole parent process.
                if os.getppid() == self._parent:
                    continue
                number = HANGUP_ONCE
            reason = _PARENT_HAS_ENDED if number == HANGUP_ONCE else ""
            if number in ONCE:
                if self._has_end_request:
                    continue
                number = ONCE[number]
            self._has_end_request |= number in ENDING
            taken.append((number, reason))
        return taken
