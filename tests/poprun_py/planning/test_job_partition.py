"""Temporary partitions, and the detection of those whose launch is dead."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.launcher.partition_states import FITTING, HOLDER, pod_in_state

from popdist_py.pods.model.partition_rules import check_name
from popdist_py.pods.model.pod_parts import Attachment
from poprun_py.planning.job_partition import (
    is_abandoned,
    is_temporary,
    permanent_name,
    temporary_name,
)

HOST = "a.host_of ours"


@pytest.fixture
def partition(tmp_path):
    """A temporary partition of this process."""
    store = pod_in_state(tmp_path / "pods", "absent")
    yield store.create_partition(replace(FITTING, name=temporary_name(HOST)))
    store.close()


def test_a_partition_of_a_living_process_is_not_abandoned(partition):
    assert is_temporary(partition.name)
    pid = os.getppid()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    of_living = replace(partition, name=f"poprun_a-host-of-ours_{pid}_{fields[19]}")
    assert not is_abandoned(of_living, (), HOST)


def test_a_partition_of_an_earlier_launch_of_this_process_is_abandoned(partition):
    assert is_abandoned(partition, (), HOST)
    held = Attachment(id="", partition=partition.name, ipus=(0,), holder=HOLDER, since=0.0)
    assert not is_abandoned(partition, (held,), HOST)


def test_a_partition_of_a_dead_process_is_abandoned(partition):
    gone = subprocess.Popen(["true"])
    gone.wait()
    of_gone = partition.name.replace(f"_{os.getpid()}_", f"_{gone.pid}_")
    assert is_abandoned(replace(partition, name=of_gone), (), HOST)
    # The process id now belongs to another process.
    other = partition.name.rpartition("_")[0] + "_1"
    assert is_abandoned(replace(partition, name=other), (), HOST)


def test_an_attached_partition_is_not_abandoned(partition):
    other = partition.name.rpartition("_")[0] + "_1"
    held = Attachment(id="", partition=other, ipus=(0,), holder=HOLDER, since=0.0)
    assert not is_abandoned(replace(partition, name=other), (held,), HOST)


@pytest.mark.parametrize(("age", "is_dead"), [(590, False), (660, False), (671, True)])
def test_only_the_age_matters_for_a_partition_of_another_host(partition, age, is_dead):
    now = partition.created + age
    assert is_abandoned(partition, (), "other", now=now, create_seconds=70.0) is is_dead


@pytest.mark.parametrize(
    ("host", "other"),
    [
        ("trainer-deployment-7d9c6b5f4d-abcde-0", "trainer-deployment-7d9c6b5f4d-abcde-1"),
        ("node.1", "node-1"),
        ("n\u00f6de", "n\u00e4de"),
        ("", "host"),
    ],
)
def test_only_the_age_matters_for_a_host_with_a_similar_name(partition, host, other):
    check_name("partition", temporary_name(host))
    assert is_temporary(temporary_name(host))
    of_other = replace(partition, name=temporary_name(other).rpartition("_")[0] + "_1")
    assert not is_abandoned(of_other, (), host)
    assert is_abandoned(of_other, (), other)


@pytest.mark.parametrize("name", ["p", "poprun_", "poprun_h_1", "poprun_h_1_2_3", "xpoprun_h_1_2"])
def test_names_that_users_give_are_not_temporary(partition, name):
    assert not is_temporary(name)
    assert not is_abandoned(replace(partition, name=name), (), "other", now=1e12)
    assert not is_temporary(permanent_name(HOST))
