"""The copy of a training's states from memory to the disk, when a job ends before its training.

The memory of a job lasts as long as the job. A batch system may kill all processes two seconds
after SIGTERM, and a step of the training may take longer. So the launcher starts the copy at once,
in another process, without help from the programs. The copy reads the memory of the launcher's
host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import popdist_py
from popdist_py.environment import RESUME_EXIT_CODE
from poprun_py.instance.job_folders import CheckpointMemory
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.terminal import Console

_COPY = (sys.executable, "-m", "popdist_py.slot_files")
_PACKAGES = str(Path(popdist_py.__file__).parents[1])
# The longest wait for a copy, such as to a disk that no longer answers.
_COPY_SECONDS = 60.0


class SavedStates:
    """The copies of one job's states to the disk.

    Args:
        memory: The folder of the states on the launcher's host.
        console: Shows warnings.
    """

    def __init__(self, memory: CheckpointMemory, console: Console) -> None:
        self._memory = memory
        self._console = console
        self._copy: subprocess.Popen[str] | None = None

    def on_signal(self, number: int) -> None:
        """Begin a copy when the launcher has received SIGTERM."""
        if number == signal.SIGTERM and self._copy is None:
            self._begin()

    def finish(self, result: LaunchResult) -> LaunchResult:
        """Copy the newest states after the end of a job that is not restarted.

        Returns:
            The result. If SIGTERM has ended the job and there is a state to resume from, the exit
            code says so.
        """
        self._end()
        if result.exit_code == 0:
            return result
        # The programs may have saved newer states after the signal. A program that has stopped at a
        # checkpoint, and a job that SIGUSR1 ends between two attempts, may have their newest state
        # in memory only.
        self._begin()
        steps = self._end()
        if not steps or result.exit_code != 128 + signal.SIGTERM:
            return result
        return replace(result, exit_code=RESUME_EXIT_CODE, may_restart=False)

    def _begin(self) -> None:
        self._memory.hold()
        if not Path(self._memory.path).is_dir():
            return
        path = os.pathsep.join(filter(None, (_PACKAGES, os.environ.get("PYTHONPATH"))))
        try:
            self._copy = subprocess.Popen(
                [*_COPY, self._memory.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                text=True,
                # A signal to the launcher's process group must not end the copy.
                start_new_session=True,
            )
        except OSError as error:
            self._console.warn(
                f"the programs' state in memory cannot be copied to the disk: {error}"
            )

    def _end(self) -> dict[str, int]:
        """Wait for the copy, if one was begun; return the steps on the disk, by folder."""
        copy, self._copy = self._copy, None
        if copy is None:
            return {}
        try:
            out, problem = copy.communicate(timeout=_COPY_SECONDS)
        except subprocess.TimeoutExpired:
            copy.kill()
            out, problem = copy.communicate()
            problem = f"the copy did not end within {_COPY_SECONDS:g} s"
        if copy.returncode:
            reason = problem.strip().splitlines()[-1:] or [
                f"the process that copies the state ended with exit code {copy.returncode}"
            ]
            self._console.warn(
                f"the programs' state in memory cannot be copied to the disk: {reason[0]}"
            )
            return {}
        return dict(json.loads(out)) if out else {}
