"""mpirun and the wrappers of a job, which several attempts at the job may use one after another.

After the failure of a program, a restart with another mpirun takes about a second. If mpirun and
all wrappers are still there, the next attempt runs its programs under the same wrappers.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from pathlib import Path

from poprun_py.instance import control_protocol
from poprun_py.instance.job_folders import JobFolder
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launcher_folder import (
    make_launcher_folder,
    make_shared_memory_folder,
)
from poprun_py.running.supervise.mpirun_process import Mpirun

# The seconds that mpirun has to end after the last instance has ended, and fewer seconds after the
# loss of a host, because mpirun's daemon on a lost host never answers.
MPIRUN_SECONDS, MPIRUN_SECONDS_AFTER_LOSS = 10.0, 1.0


class JobProcesses:
    """mpirun, the connections to the wrappers, and the folders and the selector for both.

    Attributes:
        control: The connections to the wrappers, if these are kept from the attempt before; else
            None until ``started`` is called.
        is_kept: Whether the next attempt uses mpirun and the wrappers again.
    """

    def __init__(self) -> None:
        self.control: ControlChannel | None = None
        self.is_kept = False
        self._mpirun: Mpirun | None = None
        self._folder: JobFolder | None = None
        self._selector: selectors.BaseSelector | None = None
        self._words: tuple[str, ...] = ()
        self._opened = contextlib.ExitStack()

    @property
    def folder(self) -> Path:
        """The launcher's folder; made by ``prepare``."""
        assert self._folder is not None
        return Path(self._folder.path)

    @property
    def selector(self) -> selectors.BaseSelector:
        """The selector of the supervisor's loop; made by ``open_selector``."""
        assert self._selector is not None
        return self._selector

    def open_selector(self) -> selectors.BaseSelector:
        """Return the selector of the supervisor's loop; make it, unless it is kept.

        Raises:
            OSError: The process has too many open files.
        """
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
        return self._selector

    def prepare(self, job: Job) -> None:
        """Make the folder for an attempt, unless the wrappers are kept for the attempt.

        Raises:
            StartError: The folder cannot be made.
        """
        if self.is_kept and job.command.words != self._words:
            # The restart has another plan, for example without a lost host.
            self.dismiss(is_restarted=True)
        self.is_kept = False
        if self._folder is None:
            self._folder = make_launcher_folder()

    def open_control(self, control: ControlChannel, job: Job) -> None:
        """Let the wrappers that mpirun will start connect to ``control``."""
        self.control, self._words = control, job.command.words
        self._opened.callback(control.close)
        control.open(self.selector, self.folder, job.hosts.listen)
        token = control.token if job.hosts.listen is not None else ""
        if (memory := make_shared_memory_folder(self.folder, token)) is not None:
            self._opened.callback(memory.remove)

    @property
    def mpirun(self) -> Mpirun | None:
        """The running mpirun; None before its start."""
        return self._mpirun

    @mpirun.setter
    def mpirun(self, mpirun: Mpirun) -> None:
        self._mpirun = mpirun
        self._opened.callback(mpirun.end)

    def end(self) -> None:
        """End mpirun and close the connections to the wrappers, unless both are kept."""
        if not self.is_kept:
            self._opened.close()
            self.control = self._mpirun = None

    def close(self) -> None:
        """Remove the launcher's folder after the end of mpirun, unless mpirun is kept."""
        if self.is_kept:
            return
        self.end()
        if self._selector is not None:
            self._selector.close()
        if self._folder is not None:
            self._folder.remove()
        self._folder = self._selector = None

    def dismiss(self, *, is_restarted: bool) -> None:
        """End kept wrappers; ``is_restarted`` tells them whether to keep states in memory."""
        if not self.is_kept:
            return
        if self.control is not None and self._mpirun is not None:
            self._mpirun.begin_next(lambda _: None, lambda _: None)
            self.control.broadcast(control_protocol.BYE, is_restarted)
            self._mpirun.expect_end(MPIRUN_SECONDS, time.monotonic())
            self.control.wait_for_ends(MPIRUN_SECONDS)
            self._mpirun.wait(MPIRUN_SECONDS)
        self.is_kept = False
        self.close()
