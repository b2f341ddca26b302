"""All cases of a soak: which there are, where each is done, and what they are compared to."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.lab import missing

from tools.soak import host_kills, kills, limits, network, resources
from tools.soak.cases import Case, Reference, reference
from tools.soak.jobs import MachineLoad, Place
from tools.soak.places import FourHosts, OneHost
from tools.soak.rows import Row

ALL_ROWS: tuple[Row, ...] = (
    *kills.rows(),
    *resources.rows(),
    *limits.rows(),
    *host_kills.rows(),
    *network.rows(),
)


def possible_rows(pattern: str = "") -> tuple[list[Row], dict[str, str]]:
    """Return the rows whose titles match and that can be done here; why the others cannot."""
    no_lab = missing()
    rows, left_out = [], {}
    for row in ALL_ROWS:
        if not re.search(pattern, row.title):
            continue
        reason = no_lab if row.hosts > 1 and no_lab else row.needs()
        if reason:
            left_out[row.title] = reason
        else:
            rows.append(row)
    return rows, left_out


def draw(rows: Sequence[Row], cases: int, seed: int) -> list[Row]:
    """Return the row of each case: every deck of all rows is shuffled by itself."""
    dice = random.Random(seed)
    deck = [row for row in rows for _ in range(row.weight)]
    drawn: list[Row] = []
    while deck and len(drawn) < cases:
        drawn += dice.sample(deck, len(deck))
    return drawn[:cases]


class Soak:
    """The places and references that cases share, and how a case is done in them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._load = MachineLoad()
        self._labs: queue.SimpleQueue[FourHosts] = queue.SimpleQueue()
        self._made_labs: list[FourHosts] = []
        self._switch = ThreadPoolExecutor(1)
        self._references: dict[tuple[int, str], Reference] = {}
        self._lock = threading.Lock()

    def do(self, number: int, attempt: int, row: Row) -> dict[str, Any]:
        """Do a case and return its record."""
        name = f"{number:04}{'ab'[attempt - 1]}"
        wanted = self._reference(row)  # first: it needs a place too
        with self._place(row, name) as place:
            dice = random.Random(f"{self._seed}:{number}")
            record = Case(row, place, dice, wanted, self._load).run()
        return {"number": number, "attempt": attempt, **record}

    def close(self) -> None:
        """Switch all hosts off."""
        for lab in self._made_labs:
            lab.close()
        self._switch.shutdown()

    @contextlib.contextmanager
    def _place(self, row: Row, name: str) -> Iterator[Place]:
        mark = f"{os.getpid()}-{name}"
        if row.hosts == 1:
            one = OneHost(self._folder / name, mark)
            try:
                yield one
            finally:
                one.close()
            return
        try:
            lab = self._labs.get_nowait()
        except queue.Empty:
            # Hosts die with the thread that switches them on.
            lab = self._switch.submit(FourHosts, self._folder / f"lab-{name}").result()
            self._made_labs.append(lab)
        lab.begin(lab.base / name, mark)
        try:
            yield lab
        finally:
            lab.end()
        self._labs.put(lab)

    def _reference(self, row: Row) -> Reference:
        key = (row.hosts, row.program)
        with self._lock:
            if key not in self._references:
                with self._place(row, f"ref-{row.hosts}-{row.program}") as place:
                    self._references[key] = reference(place, row.program)
            return self._references[key]
