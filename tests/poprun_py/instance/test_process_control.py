"""Facts about processes that only real ones show."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from textwrap import dedent

from support.repository import ROOT

# A shell at a terminal gives each job a process group of its own; a script gives none.
SHELL = """
    import signal, subprocess, sys
    asks = "import signal; from poprun_py.instance import process_control as p; "
    asks += "print(p.tell_when_parent_ends(signal.SIGRTMAX) is not None, flush=True)"
    for group in (0, None):
        subprocess.run([sys.executable, "-c", asks], process_group=group)
"""


def test_jobs_of_an_interactive_shell_are_ended_by_sighup_alone():
    """Whether they outlive the shell is the shell's to decide: disown, huponexit."""
    main, terminal = pty.openpty()
    try:
        # Opening a terminal makes it the one that controls a new session.
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
