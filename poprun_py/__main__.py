"""The entry point of ``poprun-py`` and ``python -m poprun_py``.

Ctrl-C during the imports ends the process without a traceback.
"""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command with the arguments of this process, and exit with its exit code."""
    # No job runs during the imports, so Ctrl-C may kill this process at once.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from poprun_py.command import cli

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
