"""How the benchmarks show their rows, and read those of jobs. No measurement lives here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_CHECKOUT = str(Path(__file__).resolve().parents[1])


def show_rows(rows: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Print each row when it is there, as one line; or as one of a JSON document's list.

    The document is whole even if the benchmark fails or is told to end (Ctrl-C, SIGTERM).
    """
    if not as_json:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print("[", end="")
    separator = "\n"
    try:
        for row in rows:
            print(separator + json.dumps(row), end="", flush=True)
            separator = ",\n"
    finally:
        print("\n]", flush=True)


def rows_of_job(words: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Run ``python -m WORDS`` on this checkout, and yield each row that it prints.

    Raises:
        SystemExit: the job failed, with its code.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _CHECKOUT},
    )
    assert process.stdout is not None
    for line in process.stdout:
        text = line.rpartition("<stdout>:")[2]
        if text.startswith("{"):
            yield json.loads(text)
    if process.wait():
        raise SystemExit(process.returncode)
