"""Collectives between real hosts: the contract, and equal bits in deterministic mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parents[1] / "popdist_py" / "collectives"


def test_contract_over_two_hosts(lab):
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", "4", "--num-replicas", "4"),
        PROGRAMS / "contract_program.py",
        "",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("GroupCommunicator 17 checks, TcpMesh") == 4


# The data between the hosts pass through sockets, through MPI, or every instance is its own host.
MESHES = {"": "TcpMesh", "TEST_WITHOUT_SOCKETS=1": "MpiMesh", "POPDIST_SHARED_MEMORY=0": "MpiMesh"}


def test_bits_do_not_depend_on_hosts(make_lab, tmp_path):
    lab = make_lab(4)
    found = []
    for hosts, instances in ((1, 1), (2, 4), (4, 4)):
        ways = [""] if hosts == 1 else [*MESHES]
        folder = tmp_path / f"{hosts} hosts, {instances} instances"
        folder.mkdir()
        done = lab[0].poprun(
            *("--host", lab.names(hosts), "--num-instances", str(instances)),
            *("--num-replicas", "8", "--oversubscribe", "--env", "TEST_STEPS=6"),
            PROGRAMS / "training_program.py",
            folder,
            *ways,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for way in ways if hosts > 1 else ():
            lines = [line for line in done.stdout.splitlines() if f"[{way}] " in line]
            assert [line.endswith(MESHES[way]) for line in lines] == [True] * instances, lines
        # The hosts of the lab share this folder.
        found += [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
    assert len(found) == 1 + len(MESHES) * (4 + 4)
    for other in found[1:]:
        for name, values in found[0].items():
            assert np.array_equal(values, other[name]), name
