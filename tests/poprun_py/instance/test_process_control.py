"""Signals from an ending parent, and stopping with a grace time."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from textwrap import dedent

from support.repository import ROOT

from poprun_py.instance.process_control import GracefulStop

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


NEVER = float("inf")


def steps(**settings):
    done = []
    ending = GracefulStop(lambda: done.append("ask"), lambda: done.append("force"), **settings)
    return ending, done


def test_a_stop_asks_once_and_forces_after_the_grace_time():
    ending, done = steps()
    assert (ending.asked_at, ending.next_deadline()) == (None, NEVER)
    ending.begin(10.0, 5)
    ending.begin(11.0, 5)
    assert (done, ending.asked_at, ending.next_deadline()) == (["ask"], 10.0, 15.0)
    ending.on_time(14.9)
    assert done == ["ask"]
    ending.on_time(15.0)
    assert (done, ending.next_deadline()) == (["ask", "force"], NEVER)


def test_a_later_call_can_only_shorten_the_grace_time():
    ending, _ = steps()
    ending.begin(10.0, 5)
    ending.force_after(1, 11.0)
    assert ending.next_deadline() == 12.0
    ending.begin(11.0, 100)
    assert ending.next_deadline() == 12.0


def test_force_is_repeated():
    ending, done = steps(repeat_seconds=0.5)
    ending.force_after(1, 10.0)
    for now in (11.0, 11.4, 11.5):
        ending.on_time(now)
    assert done == ["force", "force"]
    assert ending.asked_at is None


def test_without_a_grace_time_nothing_is_forced():
    ending, done = steps()
    ending.begin(10.0)
    ending.on_time(1e9)
    assert done == ["ask"]
