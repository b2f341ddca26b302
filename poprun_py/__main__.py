"""Where ``poprun-py`` and ``python -m poprun_py`` begin: Ctrl-C is made safe before the imports."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and exit with its code."""
    # Until something is there to be stopped, Ctrl-C ends this as any program, without a traceback.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from poprun_py.command import cli

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
