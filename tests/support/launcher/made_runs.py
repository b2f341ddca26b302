"""Folders of runs with given numbers, in the format of the launcher."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from poprun_py.past_runs.recorded_run import RecordedRun, read_run
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.running.watch.records import StepRecord

BEGAN = 1_800_000_000.0


@dataclass(frozen=True, kw_only=True)
class MadeAttempt:
    """An attempt that begins ``delay`` seconds after the run, with steps of ``step_seconds``.

    Every tenth step takes ``every_tenth`` times as long as the others. ``own_seconds`` is
    the time without waiting, by instance.
    """

    steps: int = 20
    step_seconds: float = 0.1
    every_tenth: float = 1
    samples: int = 8
    delay: float = 1.0
    first_step: int = 1
    losses: Sequence[float] = ()
    values: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    resumed_step: int | None = None
    own_seconds: Mapping[int, float] = field(default_factory=dict)


def made_run(
    folder: Path,
    name: str,
    *,
    instances: int = 1,
    replicas: int | None = None,
    attempts: Sequence[MadeAttempt] = (MadeAttempt(),),
    program: Sequence[str] = ("/opt/python/bin/python", "train.py"),
    hosts: Sequence[str] = ("localhost",),
    versions: Mapping[str, str] | None = None,
    seconds: float | None = 10.0,
    exit_code: int = 0,
) -> RecordedRun:
    """Write a run into ``folder`` and read it. Without ``seconds`` it has not ended."""
    run = folder / name
    run.mkdir(parents=True)
    told = []
    for number, attempt in enumerate(attempts, 1):
        _write_attempt(run / f"attempt-{number}", attempt, instances)
        told.append(
            {
                "number": number,
                "hosts": list(hosts),
                "resumed_step": attempt.resumed_step,
                "instances": [],
                "observation": None,
            }
        )
    report: dict[str, Any] = {
        "version": 2,
        "run_id": name,
        "state": "running" if seconds is None else "ended",
        "began_at": _moment(BEGAN),
        "ended_at": None if seconds is None else _moment(BEGAN + seconds),
        "exit_code": None if seconds is None else exit_code,
        "folder": "/home/me",
        "program": list(program),
        "plan": {"num_instances": instances, "num_replicas": replicas or instances},
        "versions": dict(versions or {"torch": "2.9", "poprun-py": "0.2.0"}),
        "attempts": told,
    }
    (run / "report.json").write_text(json.dumps(report))
    return read_run(RunFiles(run))


def _write_attempt(folder: Path, attempt: MadeAttempt, instances: int) -> None:
    folder.mkdir()
    # The first step also compiles.
    factors = [
        50 if index == 0 else attempt.every_tenth if (index + 1) % 10 == 0 else 1
        for index in range(attempt.steps)
    ]
    records = []
    for instance in range(instances):
        for index in range(attempt.steps):
            records.append(
                StepRecord(
                    at=BEGAN + attempt.delay + (index + 1) * attempt.step_seconds,
                    instance=instance,
                    step=attempt.first_step + index,
                    seconds=attempt.step_seconds * factors[index],
                    own_seconds=attempt.own_seconds.get(instance, attempt.step_seconds),
                    samples=attempt.samples,
                    loss=attempt.losses[index] if index < len(attempt.losses) else None,
                )
            )
    lines = [json.dumps(record.to_json()) for record in records]
    if lines:
        (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    logged = [
        {"at": BEGAN + attempt.delay + step * attempt.step_seconds, "step": step, "values": values}
        for step, values in attempt.values.items()
    ]
    if logged:
        text = "\n".join(map(json.dumps, logged)) + "\n"
        (folder / "instance-0.values.jsonl").write_text(text)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
