"""``python -m poprun_py.pods.command`` is the command ``poprun-py-pod``."""

from __future__ import annotations

from poprun_py.pods.command.commands import main

if __name__ == "__main__":
    main()
