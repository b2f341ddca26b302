"""Random operations of several processes that are killed at any moment: no IPU twice, none lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from support.pod_servers import ServerProcess
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_parts import PartitionRequest
from popdist_py.pods.server.server_store import ServerStore

NEVER = float("inf")


def _events(logs: Path):
    """Return the kills, and every slot's operations: (begin, its outcome or None)."""
    kills = {}
    for line in (logs / "kills").read_text().splitlines():
        entry = json.loads(line)
        kills.setdefault(entry["victim"], entry["time"])
    operations, leaves = [], {}
    for file in logs.iterdir():
        if file.name == "kills":
            continue
        begun = None
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            assert entry["phase"] != "wrong", entry
            if entry["phase"] == "begin":
                if begun is not None:
                    operations.append((begun, None))
                begun = entry
            elif entry["phase"] == "unknown":
                operations.append((begun, None))
                begun = None
            elif entry["phase"] == "leave":
                leaves[entry["pid"]] = entry["time"]
            else:
                operations.append((begun, entry))
                begun = None
        if begun is not None:
            operations.append((begun, None))
    return kills, leaves, operations


def _ended(operations, kind):
    return [
        (begin, outcome)
        for begin, outcome in operations
        if begin["operation"] == kind and outcome is not None and outcome["phase"] == "end"
    ]


def _no_overlap(spans):
    """Check spans (from, to, who) of each IPU: what is certainly had by one is had by no other."""
    for ipu, had in spans.items():
        for (_, until, first), (since, _, second) in itertools.pairwise(sorted(had)):
            assert until <= since, f"IPU {ipu} was of {first} and of {second}"


def _check_log(logs: Path):
    """Check what the processes say they had; return (certain, possible) partitions at the end."""
    kills, leaves, operations = _events(logs)
    removals = _ended(operations, "remove")
    removed = {begin["partition"]: (begin, outcome) for begin, outcome in removals}
    tried = {
        begin["partition"]: begin["time"]
        for begin, outcome in reversed(operations)
        if begin["operation"] == "remove" and outcome is None
    }
    spans = defaultdict(list)
    for begin, outcome in _ended(operations, "create"):
        name = begin["partition"]
        gone = removed[name][0]["time"] if name in removed else NEVER
        for ipu in outcome["ipus"]:
            spans[ipu].append((outcome["time"], min(gone, tried.get(name, NEVER)), name))
        assert len(outcome["ipus"]) == begin["size"]
    _no_overlap(spans)

    spans = defaultdict(list)
    detached = {b["id"]: b["time"] for b, _ in operations if b["operation"] == "detach"}
    for begin, outcome in _ended(operations, "attach"):
        pid = begin["pid"]
        ends = (detached.get(outcome["id"]), kills.get(pid), leaves.get(pid))
        until = min((end for end in ends if end is not None), default=NEVER)
        for ipu in outcome["ipus"]:
            spans[ipu].append((outcome["time"], until, outcome["id"]))
        if begin["partition"] in removed:
            # Nobody removes what is held.
            start, end = removed[begin["partition"]]
            assert start["time"] < outcome["time"] or end["time"] > until
    _no_overlap(spans)

    made = {begin["partition"] for begin, _ in _ended(operations, "create")}
    half = {b["partition"] for b, o in operations if b["operation"] == "create" and o is None}
    return made - set(removed) - set(tried), (made | half) - set(removed), operations


def _command(where, *words):
    program = Path(__file__).with_name("random_program.py")
    return [sys.executable, str(program), *map(str, (where, *words))]


def _play(folder: Path, logs: Path, workers: int, operations: int, seed: int):
    done = subprocess.run(
        _command(folder, logs, workers, operations, seed), capture_output=True, text=True,
        check=False, timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def _play_served(folder: Path, logs: Path, *words):
    """Play through a server that is killed every few seconds, and wait for the end of the leases.

    Returns:
        how often it was killed.
    """
    port, kills = 0, 0
    with ExitStack() as stack:
        play = None
        while True:
            server = stack.enter_context(ServerProcess(folder, port=port, seconds=5.0))
            port = server.port
            if play is None:
                play = stack.enter_context(
                    subprocess.Popen(
                        _command(server.url, logs, *words), stderr=subprocess.PIPE, text=True,
                        env={
                            **os.environ,
                            "PYTHONPATH": str(ROOT),
                            "POPRUN_POD_TOKEN_FILE": str(folder / "token"),
                        },
                    )
                )  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                play.wait(3)
            if play.returncode is not None:
                break
            server.end(signal.SIGKILL)
            kills += 1
        assert play.returncode == 0, play.stderr.read()
        # A warning of an attachment that a kill lost may be there, and nothing worse.
        assert "Traceback" not in play.stderr.read()
        with closing(ServerStore(server.url, (folder / "token").read_text())) as store:
            wait_until(lambda: store.attachments() == (), 30)
        assert server.end(signal.SIGTERM)[:2] == (0, "")
    return kills


def _check(folder: Path, logs: Path, *more: str):
    certain, possible, operations = _check_log(logs)
    with closing(sqlite3.connect(folder / "pod.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    with closing(FolderStore(folder)) as store:
        there = {each.name: each for each in store.partitions()}
        assert certain <= set(there) <= possible
        assert store.attachments() == ()
        sizes = {b["partition"]: b["size"] for b, _ in operations if b["operation"] == "create"}
        assert {name: each.size for name, each in there.items()} == {
            name: sizes[name] for name in there
        }
        for name in there:
            store.remove_partition(name, force=True)
        whole = store.create_partition(PartitionRequest(name="whole", size=len(store.pod().ipus())))
        assert whole.ipus == store.pod().ipus()
    assert list((folder / "holders").iterdir()) == []
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["holders", "pod.sqlite", "pod.toml", *more]
    return operations


@pytest.mark.parametrize(
    ("workers", "number", "seed"),
    [
        (4, 20, 1),
        pytest.param(8, 125, 0, marks=pytest.mark.sweep),
        *(pytest.param(8, 125, seed, marks=pytest.mark.soak) for seed in range(1, 9)),
    ],
)
def test_no_ipu_is_given_twice_and_none_is_lost(tmp_path, workers, number, seed):
    folder = make_pod(tmp_path, system_pod("POD64", "p"))
    logs = tmp_path / "logs"
    logs.mkdir()
    _play(folder, logs, workers, number, seed)
    operations = _check(folder, logs)
    assert len(operations) == workers * number
    kinds = {begin["operation"] for begin, _ in operations}
    assert kinds == {"create", "attach", "detach", "remove", "reset"}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.sweep),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 4)),
    ],
)
def test_nor_through_a_server_that_is_killed_too(tmp_path, seed):
    folder = make_pod(tmp_path, system_pod("POD64", "p"))
    logs = tmp_path / "logs"
    logs.mkdir()
    assert _play_served(folder, logs, 8, 125, seed) > 0
    operations = _check(folder, logs, "token")
    assert len(operations) == 8 * 125
    ended = sum(outcome is not None for _, outcome in operations)
    assert ended > len(operations) // 2
