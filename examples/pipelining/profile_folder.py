"""The folder of a profile: the contents of a ``profile.pop`` as text files.

profile.html    all of it on one page that needs no other file
execution.*     cycles of a call and of its stages, as text and as JSON
memory.*        what each IPU holds, likewise
schedule.*      which IPU does what from one update to the next, as a picture and as JSON

All figures come from the model of the device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from popdist_py import poptorch
from popdist_py.ipu.schedule import Cell, Schedule

__all__ = ["Profile", "ipus_at_work", "read_profile", "until_update", "write_profile"]

_WORK = ("forward", "recompute", "backward")
_STYLE = """
body { font-family: sans-serif; margin: 2em; color: #1e293b; background: #fefefe }
table { border-collapse: collapse } th, td { padding: 0.15em 0.8em }
figure { margin: 0; overflow-x: auto }
"""


@dataclass(frozen=True)
class Profile:
    """The figures of a profile that are compared with another profile.

    Attributes:
        name: The name of the profile's folder.
        strategy: The strategy, pipelined or sharded.
        schedule: The steps from the first micro-batch of an update up to the update.
        cycles: The cycles from one update to the next.
        busy: The share of a call that each IPU computes.
        needed: The bytes that each IPU needs.
    """

    name: str
    strategy: str
    schedule: Schedule
    cycles: int
    busy: tuple[float, ...]
    needed: tuple[int, ...]

    @property
    def at_work(self) -> list[int]:
        """The number of working IPUs in each step before the update."""
        return ipus_at_work(self.schedule)


def ipus_at_work(schedule: Schedule) -> list[int]:
    """Return the number of working IPUs in each step that has a forward or a backward."""
    columns = zip(*schedule.rows, strict=True)
    counts = (sum(cell.action in _WORK for cell in column) for column in columns)
    return [count for count in counts if count]


def until_update(schedule: Schedule) -> Schedule:
    """Return the steps up to the first update. The other steps of a call repeat them."""
    columns = zip(*schedule.rows, strict=True)
    steps = next(
        (step for step, cells in enumerate(columns, 1) if cells[0].action == "update"), None
    )
    return Schedule(tuple(row[:steps] for row in schedule.rows), schedule.cycles[:steps])


def write_profile(folder: Path, model: poptorch.PoplarExecutor, strategy: str) -> None:
    """Write the profile of a compiled training model into ``folder``."""
    execution, memory = model.executionReport(), model.memoryReport()
    one_update = until_update(model.schedule())
    cells = [[[c.action, c.micro_batch, c.stage] for c in row] for row in one_update.rows]
    document = {"strategy": strategy, "rows": cells, "cycles": one_update.cycles}
    files = {
        "execution.txt": f"{execution}\n",
        "execution.json": json.dumps(execution.to_json(), indent=1),
        "memory.txt": f"{memory}\n",
        "memory.json": json.dumps(memory.to_json(), indent=1),
        "schedule.json": json.dumps(document),
        "schedule.svg": one_update.svg(),
        "profile.html": _page(strategy, one_update, execution._repr_html_(), memory._repr_html_()),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def read_profile(folder: Path) -> Profile:
    """Return a profile that ``write_profile`` wrote.

    Raises:
        OSError: A file is missing.
        ValueError: A file is not part of a profile.
    """
    read = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("schedule", "execution", "memory")
    }
    try:
        drawn, execution = read["schedule"], read["execution"]
        rows = tuple(
            tuple(Cell(step, *cell) for step, cell in enumerate(row, 1)) for row in drawn["rows"]
        )
        return Profile(
            name=folder.name,
            strategy=drawn["strategy"],
            schedule=Schedule(rows, tuple(drawn["cycles"])),
            cycles=execution["cycles_between_updates"],
            busy=tuple(ipu["busy"] for ipu in execution["ipus"]),
            needed=tuple(ipu["needed"] for ipu in read["memory"]["ipus"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a profile of this program: {error!r}") from None


def _page(strategy: str, schedule: Schedule, execution: str, memory: str) -> str:
    at_work = ipus_at_work(schedule)
    title = f"{escape(strategy.capitalize())} execution over {len(schedule.rows)} IPUs"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
<p>Modelled, not measured: what the IPUs would do, hold and need.</p>
<h2>From one update to the next</h2>
<p>{len(at_work)} steps before the update; {sum(at_work) / len(at_work):.1f} IPUs work at a time,
{max(at_work)} at most. F is a forward, R a recomputation, B a backward, U the update.</p>
<figure>{schedule.svg()}</figure>
<h2>Execution</h2>{execution}
<h2>Memory</h2>{memory}
</body></html>
"""
