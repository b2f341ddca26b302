"""How the benchmarks show their rows. No measurement lives here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def show_rows(rows: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Print each row when it is there, as one line; or all at the end, as one JSON document."""
    shown = []
    for row in rows:
        shown.append(row)
        if not as_json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if as_json:
        print(json.dumps(shown, indent=1))
