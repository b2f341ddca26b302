"""``python -m poprun_py.pod_command`` is the command ``poprun-py-pod``."""

from __future__ import annotations

from poprun_py.pod_command.commands import main

if __name__ == "__main__":
    main()
