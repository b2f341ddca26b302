"""Trainings whose gradients travel compressed between hosts; no host, no effect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.models import Mlp, quiet_options

from popdist_py import poptorch

PROGRAM = Path(__file__).with_name("compression_program.py")


def assert_trained(done, instances, expected):
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for way, text in expected.items():
        assert done.stdout.count(f"[{way}] {text}") == instances


@pytest.mark.mpi
@pytest.mark.sweep
@pytest.mark.timeout(150)
def test_trainings_over_two_hosts(poprun, warm):
    way = "TEST_NUM_HOSTS=2,TEST_BRIEFLY=1"
    done = poprun("--num-instances", 2, "--num-replicas", 2, *warm, PROGRAM, way, timeout=140)
    assert_trained(done, 2, {way: "2 hosts, TcpMesh"})


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(150)
def test_trainings_over_hosts_of_two_instances_and_over_many_hosts(poprun):
    expected = {
        "TEST_NUM_HOSTS=2": "2 hosts, TcpMesh",
        "TEST_NUM_HOSTS=4,TEST_BRIEFLY=1": "4 hosts, TcpMesh",
        "TEST_NUM_HOSTS=4,TEST_WITHOUT_SOCKETS=1,TEST_BRIEFLY=1": "4 hosts, MpiMesh",
    }
    done = poprun(
        "--num-instances", 4, "--num-replicas", 4, "--oversubscribe", PROGRAM, *expected,
        timeout=140,
    )  # fmt: skip
    assert_trained(done, 4, expected)


def test_one_instance_says_that_nothing_is_compressed(caplog):
    options = quiet_options()
    options.Training.gradientCompression("powersgd")
    model = poptorch.trainingModel(Mlp(), options)
    with caplog.at_level(logging.INFO, "poptorch::python"):
        model(torch.randn(4, 6), torch.randint(0, 4, (4,)))
    lines = [line for line in caplog.messages if "gradientCompression" in line]
    assert lines == [
        "Options.Training.gradientCompression('powersgd') has no effect: all instances run on "
        "one host, and only gradients between hosts are compressed"
    ]
