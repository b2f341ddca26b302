"""Functions on hosts that share no folder with the parent: /tmp is each host's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]

ALONE = {0o700}
PROGRAM = Path(__file__).with_name("call_program.py")


def test_arguments_and_results_travel_to_other_hosts_and_back(lab):
    """64 MB each way, which neither the launcher nor the wrapper ever holds as a whole."""
    done = lab[0].run(sys.executable, PROGRAM, "node0,node1")
    assert done.returncode == 0, done.stderr
    *lines, memory, failed = done.stdout.splitlines()
    # On the other host results lie in a folder of their own, and the call is without a name.
    assert lines == [f"0 node0 True {set()} True []", f"1 node1 True {ALONE} True []"]
    assert memory.startswith("launcher True"), memory
    assert failed == "no such number ['raised in instance 1 on node1'] True"
    for host in lab.hosts:
        left = host.run("sh", "-c", "ls -d /tmp/poprun* 2>/dev/null").stdout
        assert left == "", host.name
