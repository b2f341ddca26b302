"""Functions on hosts that share no folder with the parent: /tmp is each host's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

ALONE = {0o700}
PROGRAM = Path(__file__).with_name("call_program.py")


def test_arguments_and_results_travel_to_other_hosts_and_back(lab):
    """64 MB each way, which neither launcher nor wrapper ever holds as a whole."""
    done = lab[0].run(sys.executable, PROGRAM, "node0,node1")
    assert done.returncode == 0, done.stderr
    *lines, memory, failed = done.stdout.splitlines()
    # On the other host results lie in a folder of their own, and the call is without a name.
    assert lines == [f"0 node0 True {set()} True []", f"1 node1 True {ALONE} True []"]
    assert memory.startswith("memory True True"), memory
    assert failed == "no such number ['raised in instance 1 on node1'] True"
    for host in lab.hosts:
        left = host.run("sh", "-c", "ls -d /tmp/poprun* 2>/dev/null").stdout
        assert left == "", host.name


SMALL = """
import numpy as np
import poprun_py

def job(function, *args):
    try:
        poprun_py.start(function, args=args, num_instances=2, hosts=["node0", "node1"]).result()
    except poprun_py.LaunchError as error:
        print(type(error).__name__, error)

job(len, np.ones(8 << 20))
job(lambda: __import__("numpy").ones(8 << 20))
"""


def test_a_host_without_room_says_so(make_lab, tmp_path):
    """For the call before anything starts, for the result when it is there."""
    hosts = make_lab(2)
    small = hosts[1].run("mount", "-o", "remount,size=32m", "/tmp")
    assert small.returncode == 0, small.stderr
    path = tmp_path / "script.py"
    path.write_text(SMALL)
    done = hosts[0].run(sys.executable, path)
    assert done.returncode == 0, done.stderr
    call, result = done.stdout.splitlines()
    assert call == (
        "StartError host node1 cannot store the function call of len() for instance 1 (No space "
        "left on device): free some space on this host, or set TMPDIR to another folder"
    )
    assert result.startswith("JobFailedError the result of instance 1 on node1 (ndarray) cannot be")
    assert "No space left on device): free some space, or set TMPDIR" in result
