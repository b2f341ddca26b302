"""Folders of long runs, which are written without running a job."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

from support.launcher.sysfs_trees import SNAPSHOTS

from poprun_py import LaunchConfig, plan
from poprun_py.display.formatting import iso_time
from poprun_py.past_runs.run_files import RunFiles
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_file import plan_to_json
from poprun_py.running.watch.instance_state import InstanceState
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.records import StepRecord
from poprun_py.running.watch.stragglers import slowest

MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)
BEGAN = 1_790_000_000.0
RUN_ID = "20260921-133320-1a2b3c"
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="28"><script>document.title = '
    "'taken over'</script><rect width='34' height='28' fill='#86efac'/></svg>"
)


def a_plan(instances: int = 4, **fields) -> LaunchPlan:
    """Return a plan on the described machine of the tests."""
    config = LaunchConfig(
        hardware=str(SNAPSHOTS / "example.json"),
        num_instances=instances,
        num_replicas=2 * instances,
        program=fields.pop("program", ("python3", "train.py")),
        **fields,
    )
    return replace(plan(config, environ={}, mpi=MPI), folder="/home/user")


def steps_of(instance: int, *, began: float, first: int = 1, count: int = 400) -> list[StepRecord]:
    """Return the steps of an instance; instance 2 is the slow one, and the others wait for it."""
    chance = random.Random(instance * 1000 + first)
    found, at = [], began + 1.5
    for step in range(first, first + count):
        seconds = 0.05 * (1 + 0.08 * chance.random() + (chance.random() < 0.02))
        at += seconds
        own = seconds * (0.97 if instance == 2 else 0.74 + 0.04 * chance.random())
        loss = 2.3 * math.exp(-step / 300) + 0.06 * chance.random() + 0.1
        found.append(
            StepRecord(
                at=at, instance=instance, step=step, seconds=seconds, own_seconds=own,
                samples=64, loss=loss,
            )
        )  # fmt: skip
    return found


def view_of(instances: int, seconds: float, num_steps: int = 100) -> JobView:
    """Return an observation of a job."""
    states = tuple(_state(index, seconds, num_steps) for index in range(instances))
    return JobView(
        run_id=RUN_ID, pid=4711, program="train.py", seconds=seconds, instances=states,
        worst=slowest(states),
    )  # fmt: skip


def _state(index: int, seconds: float, num_steps: int) -> InstanceState:
    waiting = 0.02 if index == 2 else 0.24
    shares = dict.fromkeys(ACTIVITIES, 0.0) | {
        "computing": 0.86 - waiting - (0.08 if index == 2 else 0), "waiting": waiting,
        "loading": 0.12 if index == 2 else 0.04, "reducing": 0.04, "updating": 0.03,
        "compiling": 0.02, "other": 0.01,
    }  # fmt: skip
    return InstanceState(
        index=index, host="localhost", pid=5000 + index, phase="training", step=num_steps,
        num_steps=num_steps, samples_per_second=1230.0, step_seconds=0.052, p95_seconds=0.06,
        own_seconds=0.0505 if index == 2 else 0.039, shares=tuple(shares.values()),
        cpu=0.9 + 0.05 * math.sin(seconds / 3 + index), num_cpus=2,
        memory_bytes=int(6e8 + 2e6 * seconds + 3e7 * index), num_samples=num_steps * 64,
        seconds=tuple(share * seconds for share in shares.values()), loss=0.5,
    )  # fmt: skip


def device_document(ipus: int = 2) -> dict:
    """Return the device file of instance 0 for a model with ``ipus`` stages."""
    return {
        "version": 1,
        "models": [
            {
                "name": "Net", "mode": "training", "replicas": 8, "stages": ipus,
                "device": {"name": "Mk2", "is_named": True, "tiles": 1472, "tile_bytes": 638976,
                           "clock": 1.33e9},
                "memory": {"fits": True, "ipus": [
                    {"ipu": i, "needed": 480_000_000 + 9_000_000 * i, "capacity": 940_572_672,
                     "fullest_tile": 400_000, "fits": True,
                     "by_category": {"weights": 220_000_000, "activations": 200_000_000,
                                     "code": 60_000_000 + 9_000_000 * i, "exchange": 0}}
                    for i in range(ipus)]},
                "schedule": {"is_whole": True, "cycles": [1], "rows": [[["forward", 1, 0]]] * ipus,
                             "svg": SVG},
                "call": {"samples": 64, "cycles": 1_000_000, "seconds": 0.00075,
                         "samples_per_second": 85_000.0, "busy": [0.8] * ipus},
            }
        ],
    }  # fmt: skip


def make_run(
    folder: Path,
    *,
    instances: int = 4,
    attempts: int = 2,
    steps: int = 400,
    failure: dict | None = None,
    planned: LaunchPlan | None = None,
    is_running: bool = False,
) -> RunFiles:
    """Write the folder of a run, whose last attempt ends with ``failure`` if it is given."""
    planned = planned or a_plan(instances)
    reports, began = [], BEGAN
    for number in range(1, attempts + 1):
        own = folder / f"attempt-{number}"
        own.mkdir(parents=True)
        is_last = number == attempts
        records = [
            record
            for index in range(instances if steps else 0)
            for record in steps_of(
                index, began=began, first=1 + (number - 1) * steps * 3 // 4, count=steps
            )
        ]
        seconds = (records[-1].at if records else began + 2) - began + 0.5
        _write(own / "steps.jsonl", *(record.to_json() for record in records))
        looks = [
            {"at": began + at, **view_of(instances, at, int(at * 20)).to_json()}
            for at in range(1, int(seconds))
        ]
        _write(own / "looks.jsonl", *(looks if records else ()))
        _write(own / "plan.json", plan_to_json(planned))
        if records:
            values = [
                {"at": began + i, "step": 1 + (number - 1) * 300 + i * 20,
                 "values": {"accuracy": 1 - math.exp(-(i + (number - 1) * 15) / 9)}}
                for i in range(1, 20)
            ]  # fmt: skip
            _write(own / "instance-0.values.jsonl", *values)
            _write(own / "instance-0.device.json", device_document())
        cause = "failed" if (failure and is_last) or not is_last else "completed"
        ending = {
            "ended_at": iso_time(began + seconds), "exit_code": 0 if cause == "completed" else 1,
            "cause": cause, "reason": "" if cause == "completed" else "instance 1 failed",
            "seconds": round(seconds, 3), "resumed_step": None if number == 1 else 300,
            "first_failure": failure if is_last else None,
            "collateral": [], "hung": [], "stacks": [],
            "instances": [_instance(index, steps) for index in range(instances)],
            "observation": view_of(instances, seconds, steps).to_json() if steps else None,
        }  # fmt: skip
        reports.append(
            {
                "number": number, "folder": own.name, "restart_count": number - 1,
                "hosts": ["localhost"], "began_at": iso_time(began), "ended_at": None,
                "exit_code": None, "cause": None, **({} if is_last and is_running else ending),
            }
        )  # fmt: skip
        began += seconds + 3
    topology = planned.topology
    code = None if is_running else 1 if failure else 0
    report = {
        "version": 2, "run_id": RUN_ID, "state": "running" if is_running else "ended",
        "launcher": {"host": "localhost", "pid": 4711}, "began_at": iso_time(BEGAN),
        "ended_at": None if is_running else iso_time(began - 3), "exit_code": code, "reason": "",
        "folder": "/home/user", "program": list(planned.config.program), "command": "mpirun ...",
        "plan": {"num_replicas": topology.num_replicas, "num_instances": topology.num_instances,
                 "num_local_replicas": topology.num_local_replicas,
                 "ipus_per_replica": topology.ipus_per_replica, "num_ilds": 1, "network": ""},
        "versions": {"poprun-py": "1.0", "python": "3.11.9", "torch": "2.9.1"},
        "attempts": reports,
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    return RunFiles(folder)


def _instance(index: int, steps: int) -> dict:
    return {
        "index": index, "name": f"instance {index} (replicas {2 * index}-{2 * index + 1})",
        "host": "localhost", "pid": 5000 + index, "code": 0, "exit_code": 0,
        "ended_by": "exit code 0", "ended_at": None, "training_step": steps or None,
        "inference_calls": None, "resumed_step": None, "was_stopped": False,
        "max_rss_bytes": 612_000_000 + index * 3_000_000, "memory_limit_bytes": None,
        "oom_kills": 0, "diagnosis": "", "traceback": "", "stderr": [],
    }  # fmt: skip


def _write(path: Path, *documents: object) -> None:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
