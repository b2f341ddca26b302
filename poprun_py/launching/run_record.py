"""What is kept of one run: its attempts, each with a folder, and the report of all.

The report is written when an attempt begins and when it has ended, so that it is there, with the
launcher's host and process id, also if the launcher is killed. Without --output-dir nothing is
kept.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from popdist_py.atomic_file import write_whole
from poprun_py.errors import LaunchError, UsageError
from poprun_py.launching.run_folder import RunFolder, run_id
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.job import LaunchResult
from poprun_py.texts import read_json


class RunRecord:
    """The record of one run; close it at the end.

    Args:
        planned: what runs.

    Attributes:
        run_id: the name of the run.
        folder: its folder; None without --output-dir.
        timeline: the trace of all attempts, once it is there.

    Raises:
        UsageError: the user's name for the run, or the folder, cannot be used.
    """

    def __init__(self, planned: LaunchPlan) -> None:
        self.run_id = run_id(planned.environ)
        self.folder: RunFolder | None = None
        self.timeline: Path | None = None
        self._plan = planned
        self._began = time.time()
        self._earlier: dict[str, Any] = {}
        self._attempts: list[dict[str, Any]] = []
        if planned.config.output_dir is not None:
            option = planned.config.named("output_dir")
            self.folder = RunFolder(planned.config.output_dir, self.run_id, option)
            try:
                self._read_earlier(self.folder)
            except UsageError:
                self.folder.close()
                raise
            self.folder.link_latest()

    @property
    def trouble(self) -> str:
        """What of it could not be kept."""
        return self.folder.trouble if self.folder is not None else ""

    @property
    def has_begun(self) -> bool:
        """Whether there was an attempt, so that there is a report."""
        return bool(self._attempts)

    def close(self) -> None:
        """Let other launchers go on with the run."""
        if self.folder is not None:
            self.folder.close()

    def begin(self, planned: LaunchPlan, restart_count: int) -> str | None:
        """Begin an attempt; returns the folder for what its instances write, if there is one.

        Raises:
            UsageError: the first one's cannot be made. A job that goes on goes on without.
        """
        if self.folder is None:
            return None
        from poprun_py.launching.run_report import begun_attempt

        self._plan = planned
        try:
            number, path = self.folder.make_attempt()
        except OSError as error:
            trouble = f"{planned.config.named('output_dir')} {self.folder.path}: {error.strerror}"
            if not restart_count:
                raise UsageError(trouble) from None
            self.folder.trouble = trouble
            number, path = len(self._attempts) + 1, None
        if path is not None:
            self._keep_plan(path)
        self._attempts.append(begun_attempt(planned, number, restart_count, time.time()))
        self._save()
        return None if path is None else str(path)

    def _keep_plan(self, folder: Path) -> None:
        """Write the plan of an attempt, as --from-plan reads it; without one the job runs too."""
        from poprun_py.planning.plan_file import plan_to_json, portable

        assert self.folder is not None
        document = plan_to_json(portable(self._plan))
        try:
            write_whole(folder / "plan.json", json.dumps(document, indent=2) + "\n")
        except OSError as error:
            self.folder.trouble = f"{folder} has no plan: {error.strerror}"

    def end(self, result: LaunchResult) -> None:
        """Note how the attempt ended."""
        if self.folder is not None:
            from poprun_py.launching.run_report import ended_attempt

            label = self._plan.instance_label
            self._attempts[-1] = ended_attempt(self._attempts[-1], result, label, time.time())
            self._save()

    def refuse(self, error: LaunchError) -> None:
        """Note that the programs of the attempt did not start, which ends the run."""
        if self.folder is not None:
            from poprun_py.launching.run_report import refused_attempt

            self._attempts[-1] = refused_attempt(
                self._attempts[-1], error.exit_code, str(error), time.time()
            )
            self._finish(error.exit_code, str(error))

    def interrupt(self, number: int) -> None:
        """Note that a signal ended the run while no program of it was running.

        If an attempt has begun, note that its programs did not start.
        """
        if not self._attempts:
            return
        from poprun_py.launching.run_report import refused_attempt

        reason = f"{signal.Signals(number).name} received while no program was running"
        if self._attempts[-1].get("cause") is None:
            self._attempts[-1] = refused_attempt(
                self._attempts[-1], 128 + number, reason, time.time(), cause="signal"
            )
        self._finish(128 + number, reason)

    def finish(self, result: LaunchResult) -> None:
        """Note how the run ended."""
        self._finish(result.exit_code, result.explanation)

    def _finish(self, exit_code: int, reason: str) -> None:
        if self.folder is not None:
            from poprun_py.launching.run_report import moment

            ending = {"ended_at": moment(time.time()), "exit_code": exit_code, "reason": reason}
            self._save({**ending, "timeline": self._shown_timeline()})

    def _shown_timeline(self) -> str | None:
        """Return the trace's path: from the run's folder if it is there, else the whole."""
        if self.timeline is None or self.folder is None:
            return None
        whole, folder = self.timeline.absolute(), self.folder.path.absolute()
        return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)

    def _save(self, ending: dict[str, Any] | None = None) -> None:
        """Write the report of what is known now."""
        from poprun_py.launching.run_report import brief_report, moment, run_report
        from poprun_py.versions import versions

        assert self.folder is not None
        report = run_report(
            self._plan,
            run_id=self.run_id,
            launcher={"host": os.uname().nodename, "pid": os.getpid()},
            began_at=self._earlier.get("began_at") or moment(self._began),
            # Looking at everything that is installed would delay the start.
            versions=versions(full=ending is not None),
            attempts=self._attempts,
            ending=ending,
        )
        self.folder.save_report(
            json.dumps(report, indent=2) + "\n", json.dumps(brief_report(report)) + "\n"
        )

    def _read_earlier(self, folder: RunFolder) -> None:
        """Take the attempts of an earlier launch of this run.

        Raises:
            UsageError: the report is none.
        """
        text = folder.earlier_report()
        if text is None:
            return
        try:
            report = read_json(text)
            attempts = report["attempts"]
            if not isinstance(attempts, list) or not all(isinstance(a, dict) for a in attempts):
                raise ValueError("no list of attempts")
        except (ValueError, TypeError, KeyError) as error:
            raise folder.not_a_report(str(error)) from None
        self._earlier = report
        # An attempt without an end lost its launcher: the lock of the folder is ours.
        self._attempts = [
            a if a.get("cause") else {**a, "cause": "launcher_lost"} for a in attempts
        ]
