"""The folder of one run under --output-dir, with its report and a folder for each attempt.

    DIR/latest -> 20260131-120000-1a2b3c    the run that began last
    DIR/20260131-120000-1a2b3c/report.json
    DIR/20260131-120000-1a2b3c/attempt-1/

The launcher keeps the output of all attempts and runs. If the launcher is killed, report.json still
contains the host and the process id of the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.environment import RESUME_EXIT_CODE, RUN_ID
from poprun_py.display.formatting import iso_time, read_json
from poprun_py.errors import UsageError
from poprun_py.launching.failure_report import (
    Label,
    collateral_of,
    diagnosis,
    stderr_excerpt,
    traceback_of,
)
from poprun_py.launching.replanning import change_json
from poprun_py.options.run_labels import LATEST, labels_json, read_tags
from poprun_py.past_runs.listing.latest_link import link_latest, repair_latest
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.running.supervise.launch_result import (
    Collective,
    InstanceResult,
    LaunchResult,
    describe,
)
from poprun_py.running.watch.job_view import NO_STEPS

if TYPE_CHECKING:
    from poprun_py.launching.restart_costs import RestartCost

_REPORT = "report.json"
_ATTEMPT = re.compile(r"attempt-(\d+)")
REPORT_VERSION = 2
_MOST_OF_REASON: Final = 200
_LOCK_TRIES: Final = 5
_LOCK_SECONDS: Final = 0.02
# The keys of an attempt that the brief version of report.json keeps. The values of these keys do
# not grow with the number of instances.
_BRIEF: Final = {
    *("number", "folder", "restart_count", "hosts", "began_at", "ended_at"),
    *("exit_code", "cause", "seconds"),
}
_NOT_ENDED: Final = {"ended_at": None, "exit_code": None, "reason": "", "timeline": None}


class RunFolder:
    """The folder of one run, private to its owner and locked against other launchers.

    If the user names an existing run, the launch adds its attempts to the attempts of that run. But
    if ``is_new`` is true and a run has the name already, this run gets a suffix, such as ``-2``.

    Attributes:
        run_id: The name of the run, with its suffix.
        labels: The tags and the note of the run, as in its report. A launch that continues a run
            keeps the tags and the note of the earlier launches, unless it gives others.
        path: The path of the run's folder.
        trouble: A sentence about the last file that could not be written, or an empty string.
        has_begun: Whether this launch has begun an attempt, and so has written a report.

    Raises:
        UsageError: The run's folder cannot be made or written to, the report in this folder cannot
            be read, or a run of the same name is still running.
    """

    def __init__(self, planned: LaunchPlan, run_id: str, *, is_new: bool = False) -> None:
        parent, option = planned.config.output_dir, planned.config.named("output_dir")
        assert parent is not None
        self.run_id, self.path = run_id, Path(parent, run_id)
        self.trouble = ""
        self.has_begun = False
        self._is_made = False  # whether this launch has made the folder
        self._parent = Path(parent)
        self._plan = planned
        self._began_at = iso_time(time.time())
        config = planned.config
        self.labels: Mapping[str, Any] = labels_json(read_tags(config.tag), config.note)
        self._attempts: list[dict[str, Any]] = []
        self._conditions: dict[str, Any] = {}
        with contextlib.ExitStack() as undo:
            self._lock = self._open(option, is_new)
            undo.callback(self.close)
            self._lock_out_others()
            self._read_earlier_report()
            self._link_latest()
            undo.pop_all()

    def _open(self, option: str, is_new: bool) -> int:
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._make(is_new)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"{option} {self._parent}: the folder of the run cannot be created "
                f"({error.strerror})"
            ) from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.close(descriptor)
            raise UsageError(
                f"{option} {self._parent}: no files can be created in the folder of the run, "
                f"{self.path}"
            )
        return descriptor

    def _make(self, is_new: bool) -> None:
        name = self.run_id
        for number in itertools.count(2):
            try:
                self.path.mkdir(mode=0o700)
            except FileExistsError:
                if not is_new:
                    return
                self.run_id = f"{name}-{number}"
                self.path = self._parent / self.run_id
            else:
                self._is_made = True
                return

    def _lock_out_others(self) -> None:
        for tries_left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not tries_left:
                    raise UsageError(
                        f"{RUN_ID}={self.run_id}: the run of this name in {self._parent} has not "
                        "ended; wait for its end, or give this run another name"
                    ) from None
            except OSError:
                return  # the file system does not support locks
            # A list of runs holds the lock for a moment, to see whether a launcher holds it.
            time.sleep(_LOCK_SECONDS)

    def _read_earlier_report(self) -> None:
        """Read the attempts of earlier launches of this run from the existing report.json."""
        path = self.path / _REPORT
        try:
            report = read_json(path.read_text(encoding="utf-8"))
            attempts = report["attempts"]
            if not isinstance(attempts, list) or not all(isinstance(a, dict) for a in attempts):
                raise ValueError("the key attempts is not a list of objects")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{path} is not the report of a run ({reason}); move the file away, or give this "
                f"run another {RUN_ID}"
            ) from None
        self._began_at = report.get("began_at") or self._began_at
        earlier = report.get("tags")
        tags = {**(earlier if isinstance(earlier, dict) else {}), **self.labels.get("tags", {})}
        self.labels = labels_json(tags, self.labels.get("note") or report.get("note"))
        # This process holds the lock of the run's folder, so all earlier launchers of the run have
        # ended. If an attempt has no recorded cause of its end, its launcher was killed.
        self._attempts = [
            a if a.get("cause") else {**a, "cause": "launcher_lost"} for a in attempts
        ]

    def _link_latest(self) -> None:
        try:
            link_latest(self._parent, self.path.name)
        except OSError as error:
            self.trouble = f"the link {self._parent / LATEST} cannot be updated: {error.strerror}"

    def close(self) -> None:
        """Unlock the run's folder, so that other launchers can continue the run.

        If the launch was refused before its first attempt, remove the empty folder, so that its
        name is free.
        """
        if self._is_made and not self.has_begun:
            # A launch that begins does not need this module.
            from poprun_py.past_runs.listing.run_summary import read_summaries

            with contextlib.suppress(OSError, UsageError):
                self.path.rmdir()
                left = read_summaries(self._parent)
                repair_latest(self._parent, left[0].name if left else None)
        os.close(self._lock)

    # --- start and end of an attempt ----------------------------------------------------------

    def note_resources(self, queue_seconds: float, *, shares_cores: bool) -> None:
        """Note how the launch got its cores and IPUs, for the report of its attempts.

        A new run begins now: the time of ``queue_seconds`` is before ``began_at``, whether the
        launch waited for cores or for IPUs.

        Args:
            queue_seconds: The seconds for which the launch waited for cores and IPUs of other jobs.
            shares_cores: Whether other jobs hold some of the cores.
        """
        self._conditions = {"queue_seconds": round(queue_seconds, 3)} if queue_seconds else {}
        if shares_cores:
            self._conditions["shares_cores"] = True
        if not self._attempts:
            self._began_at = iso_time(time.time())

    def begin_attempt(self, planned: LaunchPlan, restart_count: int) -> str | None:
        """Make the folder of an attempt and return its path.

        If the folder cannot be made for a restart, return None; the restart runs without a folder.

        Raises:
            UsageError: The folder of the first attempt cannot be made.
        """
        change = change_json(self._plan, planned) if restart_count else {}
        self._plan = planned
        try:
            number, path = self._make_attempt()
        except OSError as error:
            trouble = (
                f"{planned.config.named('output_dir')} {self.path}: the folder of the attempt "
                f"cannot be created ({error.strerror})"
            )
            if not restart_count:
                raise UsageError(trouble) from None
            self.trouble = trouble
            number, path = len(self._attempts) + 1, None
        if path is not None:
            self._write_plan(path)
        self.has_begun = True
        self._attempts.append(
            {
                "number": number,
                "folder": f"attempt-{number}",
                "restart_count": restart_count,
                "hosts": [host.name for host in planned.topology.hosts],
                "began_at": iso_time(time.time()),
                "ended_at": None,
                "exit_code": None,
                "cause": None,
                **({"host_change": change} if change else {}),
                **self._conditions,
                **_machine_at_start(),
            }
        )
        self._conditions.pop("queue_seconds", None)  # only the first attempt has waited
        self._write_report()
        return None if path is None else str(path)

    def _make_attempt(self) -> tuple[int, Path]:
        self._make_if_removed()
        numbers = [int(m[1]) for name in os.listdir(self.path) if (m := _ATTEMPT.fullmatch(name))]  # noqa: PTH208 (names)
        number = max(numbers, default=0) + 1
        path = self.path / f"attempt-{number}"
        path.mkdir(mode=0o700)
        return number, path

    def _make_if_removed(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _write_plan(self, folder: Path) -> None:
        """Write an attempt's plan to its folder for --from-plan; a failure is only a warning."""
        from poprun_py.planning.plan_file import plan_to_json, portable

        document = plan_to_json(portable(self._plan))
        try:
            write_whole(folder / "plan.json", json.dumps(document, indent=2) + "\n")
        except OSError as error:
            self.trouble = (
                f"the plan of the attempt cannot be written to {folder}: {error.strerror}"
            )

    def note_restart(self, cost: RestartCost) -> None:
        """Note the cost of the restart before the current attempt, for the attempt's end."""
        self._attempts[-1]["restart"] = cost.to_json()

    def end_attempt(self, result: LaunchResult) -> None:
        """Write the result of the current attempt into report.json."""
        label = self._plan.instance_label
        self._attempts[-1] |= ended_attempt(result, label)
        self._write_report()

    def finish(
        self, exit_code: int, reason: str, timeline: Path | None = None, cause: str = ""
    ) -> None:
        """Write the end of the run into report.json, if an attempt has begun.

        If the last attempt has no recorded end yet, ``cause`` is recorded as the cause of its end.
        """
        if not self.has_begun:
            return
        ending = {"ended_at": iso_time(time.time()), "exit_code": exit_code, "reason": reason}
        if self._attempts[-1]["cause"] is None:
            self._attempts[-1] |= {**ending, "cause": cause, "instances": []}
        if timeline is not None:
            path, folder = timeline.absolute(), self.path.absolute()
            # A path inside the run's folder is stored as a relative path, because users may move
            # the folder.
            timeline = path.relative_to(folder) if path.is_relative_to(folder) else path
        self._write_report({**ending, "timeline": None if timeline is None else str(timeline)})

    def _write_report(self, ending: dict[str, Any] | None = None) -> None:
        """Write ``report.json`` atomically; on a full disk, overwrite it with a short report."""
        report = self._report(ending)
        path = self.path / _REPORT
        try:
            self._make_if_removed()
            write_whole(path, json.dumps(report, indent=2) + "\n")
        except OSError as error:
            self.trouble = (
                f"the report of the run cannot be written to {self.path}: {error.strerror}"
            )
            brief = json.dumps(_brief(report)) + "\n"
            if _overwrite(path, brief.encode()):
                self.trouble = f"{path} contains only a short report: {error.strerror}"

    def _report(self, ending: dict[str, Any] | None) -> dict[str, Any]:
        """Return the contents of report.json; ``ending`` is None until the run has ended."""
        from poprun_py.versions import versions

        plan, topology = self._plan, self._plan.topology
        return {
            "version": REPORT_VERSION,
            "run_id": self.run_id,
            **self.labels,
            "state": "running" if ending is None else "ended",
            "launcher": {"host": os.uname().nodename, "pid": os.getpid()},
            "began_at": self._began_at,
            **(_NOT_ENDED if ending is None else ending),
            "folder": plan.folder,
            "program": plan.config.program,
            "command": shlex.join(plan.command),
            "plan": {
                "num_replicas": topology.num_replicas,
                "num_instances": topology.num_instances,
                "num_local_replicas": topology.num_local_replicas,
                "ipus_per_replica": topology.ipus_per_replica,
                "num_ilds": topology.num_ilds,
                "network": plan.network,
            },
            # Looking up the versions of all installed packages would delay the start of the job.
            "versions": versions(full=ending is not None),
            "attempts": self._attempts,
        }


def _overwrite(path: Path, data: bytes) -> bool:
    """Overwrite a file without new disk space; return False if ``data`` does not fit."""
    try:
        with path.open("r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if len(data) > max(state.st_size, 512 * state.st_blocks):
                return False
            is_whole = file.write(data) == len(data)
            file.truncate()
            return is_whole
    except OSError:
        return False


def _machine_at_start() -> dict[str, Any]:
    """Return the load of this machine before an attempt starts; empty if it is not known."""
    with contextlib.suppress(OSError):
        load = round(os.getloadavg()[0], 2)
        return {"machine_at_start": {"load": load, "num_cpus": os.cpu_count()}}
    return {}


# --- the contents of report.json ------------------------------------------------------------------


def _brief(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a short report that only tells how the run and its attempts ended."""
    return {
        **report,
        "reason": report["reason"][:_MOST_OF_REASON],
        "versions": {},
        "attempts": [
            {
                **{name: value for name, value in attempt.items() if name in _BRIEF},
                "reason": str(attempt.get("reason", ""))[:_MOST_OF_REASON],
                "instances": [],
            }
            for attempt in report["attempts"]
        ],
    }


def ended_attempt(result: LaunchResult, label: Label) -> dict[str, Any]:
    """Return the entries of report.json for an attempt that ends now, with all its instances."""
    first = result.first_failure
    progress = [r.progress for r in result.instances if r.progress is not None]
    return {
        "ended_at": iso_time(time.time()),
        "exit_code": result.exit_code,
        "cause": _cause(result),
        "reason": result.explanation,
        "seconds": round(result.seconds, 3),
        "resumed_step": max((p.resumed for p in progress), default=0) or None,
        "first_failure": None if first is None else _instance_json(first, label),
        "collateral": [r.index for r in collateral_of(result)],
        "hung": list(result.hung),
        "stacks": [
            {"instances": list(g.instances), "waits": g.waits, "text": g.text}
            for g in result.stacks
        ],
        "instances": [_instance_json(r, label) for r in result.instances],
        "observation": None if result.view is None else result.view.to_json(),
        **_no_steps(result),
    }


def _no_steps(result: LaunchResult) -> dict[str, str]:
    """Return the entry that says why an attempt has no training steps; empty for other attempts."""
    progress = [each.progress for each in result.instances]
    if not progress or any(each is not None and each.counts for each in progress):
        return {}
    reason = NO_STEPS if result.view is None else result.view.why_no_steps
    return {"no_steps": f"the program {reason}"}


def _cause(result: LaunchResult) -> str:
    """Return one word for the cause of an attempt's end, such as ``completed``."""
    if result.exit_code == 0:
        return "completed"
    if result.exit_code == RESUME_EXIT_CODE and not result.ended_for_hosts:
        return "checkpoint"
    return result.cause.name.lower() if result.cause is not None else "failed"


def _instance_json(instance: InstanceResult, label: Label) -> dict[str, Any]:
    progress = instance.progress
    return {
        "index": instance.index,
        "name": label(instance.index),
        "host": instance.host,
        "pid": instance.pid,
        "code": instance.code,
        "exit_code": instance.exit_code,
        "ended_by": None if instance.code is None else describe(instance.code),
        "ended_at": iso_time(instance.ended_ns / 1e9) if instance.ended_ns else None,
        "training_step": instance.step,
        "inference_calls": None if progress is None else progress.calls,
        "resumed_step": None if progress is None else progress.resumed or None,
        "last_collective": _collective_json(instance.collective),
        "was_stopped": instance.was_stopped,
        "max_rss_bytes": instance.max_rss_bytes,
        "memory_limit_bytes": instance.memory_limit_bytes,
        "oom_kills": instance.oom_kills,
        "diagnosis": diagnosis(instance) if instance.failed else "",
        "traceback": traceback_of(instance.stderr_tail) if instance.failed else "",
        "stderr": stderr_excerpt(instance.stderr_tail) if instance.failed else [],
    }


def _collective_json(last: Collective | None) -> dict[str, Any] | None:
    if last is None:
        return None
    seconds = round(last.seconds, 3) if last.goes_on else None
    return {"number": last.number, "name": last.name, "lasting_seconds": seconds}
