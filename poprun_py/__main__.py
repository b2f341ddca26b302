"""``python -m poprun_py``: the same as the command ``poprun-py``."""

from __future__ import annotations

from poprun_py.cli import main

if __name__ == "__main__":
    main()
