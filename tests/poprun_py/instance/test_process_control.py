"""Signals from an ending parent."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from textwrap import dedent

from support.repository import ROOT

# A shell at a terminal gives each job its own process group. A script does not.
SHELL = """
    import signal, subprocess, sys
    asks = "import signal; from poprun_py.instance import process_control as p; "
    asks += "print(p.signal_when_parent_ends(signal.SIGRTMAX) is not None, flush=True)"
    for group in (0, None):
        subprocess.run([sys.executable, "-c", asks], process_group=group)
"""


def test_a_job_of_an_interactive_shell_asks_for_no_signal():
    """The user decides whether it outlives the shell, by disown or huponexit."""
    main, terminal = pty.openpty()
    try:
        # The leader of a new session gets the terminal that it opens as its controlling terminal.
        become = f"import os; os.open({os.ttyname(terminal)!r}, os.O_RDWR)\n"
        done = subprocess.run(
            [sys.executable, "-c", become + dedent(SHELL)],
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(main)
        os.close(terminal)
    assert done.stdout.split() == ["False", "True"], done.stderr
