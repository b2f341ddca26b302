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


def test_bits_do_not_depend_on_hosts(lab, tmp_path):
    found = []
    for hosts, instances in ((1, 1), (2, 4)):
        folder = tmp_path / f"{hosts} hosts"
        folder.mkdir()
        names = lab.names(hosts)
        done = lab[0].poprun(
            *("--host", names, "--num-instances", str(instances), "--num-replicas", "8"),
            *("--env", "TEST_STEPS=6"),
            PROGRAMS / "training_program.py",
            folder,
            "",
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        # The hosts of the lab share this folder.
        found += [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]
    assert len(found) == 5
    for other in found[1:]:
        for name, values in found[0].items():
            assert np.array_equal(values, other[name]), name
