"""The timeline of a job on several hosts: files travel, and clocks are compared."""

from __future__ import annotations

import re
import sys

import pytest
from support.repository import ROOT
from support.trace_tables import query

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

PROGRAM = ROOT / "tests" / "system" / "timeline_program.py"


def test_instances_of_other_hosts_are_in_the_trace(lab, tmp_path):
    """The hosts of the lab have one clock, so that the comparison of two can be checked."""
    path = tmp_path / "timeline.json.gz"
    done = lab[0].poprun("--host", "node[0-1]", "--num-instances", "2", "--num-replicas", "2",
                         f"--timeline={path}", sys.executable, PROGRAM)  # fmt: skip
    assert done.returncode == 0, done.stderr
    bound = float(re.search(r"clocks of the hosts agree to ([\d.]+) ms", done.stderr)[1])
    assert bound > 0
    counts = query(
        path,
        "SELECT process.name, COUNT(*) FROM slice JOIN thread_track ON track_id = thread_track.id"
        " JOIN thread USING (utid) JOIN process USING (upid) WHERE slice.name = 'step'"
        " GROUP BY process.name",
    )
    assert counts == [("instance 0", "12"), ("instance 1", "12")]
    # Nobody leaves a reduction before the last one is there, as far as clocks are known.
    late = query(
        path,
        "SELECT COUNT(*), MAX(b.ts - a.ts - a.dur) FROM flow JOIN slice a ON slice_out = a.id"
        " JOIN slice b ON slice_in = b.id WHERE a.name = b.name",
    )
    assert int(late[0][0]) >= 12
    assert float(late[0][1]) <= 2 * bound * 1e6
