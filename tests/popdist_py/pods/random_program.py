"""Processes that do random operations on one pod, while one after the other is killed.

``random_program.py WHERE LOGS WORKERS OPERATIONS SEED``: each of WORKERS does OPERATIONS on the pod
of a folder or server; who is killed has a successor, which does the rest. Every operation stands in
LOGS/SLOT, a line before and a line after it; kills stand in LOGS/kills. Times are of the machine's
monotonic clock.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.model.pod_errors import (
    InUseError,
    NameTakenError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
    UnreachableError,
)
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest
from popdist_py.pods.server.server_store import ServerStore

REFUSALS = (InUseError, NotEnoughIpusError)


def open_store(where: str, user: str):
    if "://" not in where:
        return FolderStore(Path(where), user=user)
    token = Path(os.environ["POPRUN_POD_TOKEN_FILE"]).read_text()
    return ServerStore(where, token, 20.0, user=user)


class Log:
    """Lines that survive their writer: one write each."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, **entry: object) -> None:
        line = json.dumps({"time": time.monotonic(), "pid": os.getpid(), **entry})
        os.write(self._descriptor, f"{line}\n".encode())


class Worker:
    """One process of a slot; it acts as a user of its own."""

    def __init__(self, where: str, log: Log, slot: int, done: int) -> None:
        self.user = f"u{slot}"
        self.store = open_store(where, self.user)
        self.is_served = "://" in where
        self.log, self.slot = log, slot
        self.random = random.Random(f"{slot} {done} {sys.argv[5]}")
        self.held = []

    def operate(self, number: int) -> None:
        name, act = self.random.choice(
            [
                ("create", self.create),
                ("create", self.create),
                ("attach", self.attach),
                ("attach", self.attach),
                ("detach", self.detach),
                ("remove", self.remove),
                ("reset", self.reset),
            ]
        )
        while True:
            try:
                target = self.target(name, number)
                break
            except UnreachableError:  # the server is killed too, and starts again
                pass
        self.log.write(phase="begin", number=number, operation=name, **target)
        try:
            found = act(**target)
        except UnreachableError:
            self.log.write(phase="unknown", number=number)
        except (NameTakenError, UnknownNameError) as error:
            # A request that a server did right before it was killed is repeated at the next one.
            phase = "unknown" if self.is_served else "refused"
            self.log.write(phase=phase, number=number, why=type(error).__name__)
        except REFUSALS as error:
            self.log.write(phase="refused", number=number, why=type(error).__name__)
        except PodError as error:
            self.log.write(phase="wrong", number=number, why=repr(error))
        else:
            self.log.write(phase="end", number=number, **found)

    def target(self, name: str, number: int) -> dict:
        if name == "create":
            return {"partition": f"s{self.slot}-{number}", "size": 1 << self.random.randrange(4)}
        if name == "detach":
            held = self.held[self.random.randrange(len(self.held))] if self.held else None
            return {"id": held.id if held else ""}
        there = self.store.partitions()
        if name in ("remove", "reset"):
            there = [each for each in there if each.owner == self.user]
        chosen = self.random.choice(there).name if there else "none"
        size = {"size": 1 << self.random.randrange(3)} if name == "attach" else {}
        return {"partition": chosen, **size}

    def create(self, partition: str, size: int) -> dict:
        loose = self.random.random() < 0.5
        asked = PartitionRequest(name=partition, size=size, reconfigurable=loose)
        made = self.store.create_partition(asked)
        return {"ipus": [ipu.index for ipu in made.ipus]}

    def attach(self, partition: str, size: int) -> dict:
        places = [ipu.index for ipu in self.store.partition(partition).ipus]
        me = Holder(host="h", pid=os.getpid(), user=self.user, program="random")
        attachment = self.store.attach(partition, min(size, len(places)), me)
        self.held.append(attachment)
        return {"id": attachment.id, "ipus": [places[ipu] for ipu in attachment.ipus]}

    def detach(self, id: str) -> dict:
        for each in [each for each in self.held if each.id == id]:
            self.store.detach(each)
            self.held.remove(each)
        return {}

    def remove(self, partition: str) -> dict:
        self.store.remove_partition(partition)
        return {}

    def reset(self, partition: str) -> dict:
        return {"generation": self.store.reset_partition(partition).generation}


def work(where: str, logs: Path, slot: int, operations: int) -> None:
    file = logs / str(slot)
    lines = [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    done = sum(line["phase"] == "begin" for line in lines)
    log = Log(file)
    worker = Worker(where, log, slot, done)
    for number in range(done, operations):
        worker.operate(number)
    log.write(phase="leave")
    worker.store.close()


def start(where: str, logs: Path, slot: int, operations: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(where, logs, slot, operations)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return pid


def main() -> int:
    where, logs = sys.argv[1], Path(sys.argv[2])
    workers, operations = int(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(sys.argv[5])
    kills = Log(logs / "kills")
    slots = {start(where, logs, slot, operations): slot for slot in range(workers)}
    # The next kill comes when the logs have grown so far: there is progress on any machine.
    next_kill = 0
    while slots:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            slot = slots.pop(pid)
            if os.WIFSIGNALED(status):
                slots[start(where, logs, slot, operations)] = slot
            elif status:
                for other in slots:
                    os.kill(other, signal.SIGKILL)
                return 1
            continue
        written = sum(file.stat().st_size for file in logs.iterdir() if file.name != "kills")
        if written > next_kill:
            next_kill = written + chance.randrange(500, 4000)
            time.sleep(chance.uniform(0, 0.003))
            victim = chance.choice(sorted(slots))
            kills.write(victim=victim)
            os.kill(victim, signal.SIGKILL)
        time.sleep(0.0005)
    return 0


if __name__ == "__main__":
    sys.exit(main())
