"""How the benchmarks show their rows. No measurement lives here."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable
from typing import Any


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
