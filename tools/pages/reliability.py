"""Writes the fault table of docs/reliability.md: ``python -m tools.pages.reliability [MPI]...``.

Every row is done to a real job (tools/soak/faults.py), under the installed Open MPI 5 and under
each further ``NAME=MPIRUN[,LIBMPI]`` that is given. It takes some two minutes per MPI.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from tools.soak.faults import FAULTS, Fault, measure, problems

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- fault table -->\n).*?(?=<!-- end -->)", re.DOTALL)


def cell(fault: Fault, mpirun: str) -> str:
    """Do ``fault`` once and return what was seen, with what was not as expected in bold."""
    with tempfile.TemporaryDirectory() as folder:
        seen = measure(fault, Path(folder) / "out", mpi=mpirun, limit=20)
    wrong = problems(fault, seen)
    if seen.code is None:
        return "**did not return**"
    if seen.seconds > fault.seconds:
        wrong.append(f"took {seen.seconds:.1f} s")
    text = f"{seen.code} in {seen.seconds:.1f} s, {len(seen.survivors)} left"
    return f"**{text}: {', '.join(wrong)}**" if wrong else text


def expected(fault: Fault) -> str:
    """Return what a row of the table wants."""
    named = f", names {fault.named}" if fault.named is not None else ""
    return f"{fault.code} within {fault.seconds:g} s, 0 left{named}"


def main(mpis: list[str]) -> None:
    """Measure every fault under every MPI and write the table."""
    columns = [("Open MPI 5", "", "")]
    for text in mpis:
        name, _, rest = text.partition("=")
        mpirun, _, library = rest.partition(",")
        columns.append((name, mpirun, library))
    rows = [
        "| fault | expected | " + " | ".join(name for name, _, _ in columns) + " |",
        "| --- | --- |" + " --- |" * len(columns),
    ]
    for fault in FAULTS:
        cells = []
        for _, mpirun, library in columns:
            os.environ.pop("MPI4PY_LIBMPI", None)
            if library:
                os.environ["MPI4PY_LIBMPI"] = library
            cells.append(cell(fault, mpirun))
        rows.append(f"| {fault.title} | {expected(fault)} | {' | '.join(cells)} |")
        sys.stdout.write(rows[-1] + "\n")
        sys.stdout.flush()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: "\n".join(rows) + "\n", page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
