"""Strangers on the network and on a host of the job: it starts, ends and says who they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
STRANGER = Path(__file__).with_name("stranger_program.py")
NOBODY = 65534
PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("popdist")
rank, total = dist.get_rank(), torch.ones(1000)
for _ in range(20):
    dist.all_reduce(total)
    work = dist.isend(total, 1 - rank)
    dist.recv(total, 1 - rank)
    work.wait()
    total /= 2
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
# Rank 0 has torch's own store as well, which takes everybody.
print(total.sum().item(), objects, rank == 0 or len(os.listdir("/proc/self/fd")) < 200)
dist.destroy_process_group()
"""


@pytest.fixture
def besieged(make_lab, tmp_path):
    """Give three hosts of which the third, and another user of the first, besiege the others."""
    lab, targets, end = make_lab(3), tmp_path / "targets", tmp_path / "end"
    targets.touch()
    end.touch()
    python = (sys.executable, STRANGER)
    started = [host.start(*python, "find", host.address, targets, end) for host in lab.hosts[:2]]
    strangers = [
        lab[2].start(*python, "besiege", targets, end),
        lab[0].start(*python, "besiege", targets, end, NOBODY),
    ]
    yield lab
    end.write_text("now")
    for each in (*started, *strangers):
        met, said = each.communicate(timeout=20)
        assert each.returncode == 0, said
        assert each in started or int(met) > 10


def test_a_job_runs_among_strangers_and_tells_of_them_once(besieged, script, tmp_path):
    done = besieged[0].poprun(
        *("--host", besieged.names(2), "--num-instances", "2", "--num-replicas", "2"),
        script(PROGRAM),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    expected = f"1000.0 {[{'rank': 0}, {'rank': 1}]} True"
    assert [line.partition(">:")[2] for line in done.stdout.splitlines()] == [expected] * 2
    told = [line for line in done.stderr.splitlines() if "is not of this job" in line]
    # The launcher tells of one, and each rank of one for its mesh and one for its messages.
    assert 1 <= len(told) <= 5, told
    assert {word for line in told for word in line.split() if word.startswith("10.99.")} <= {
        besieged[0].address,
        besieged[2].address,
    }
    assert not list(tmp_path.rglob("pickle-was-read"))
