"""A wait for a lost or late instance ends with an error that names the instance."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.processes import wait_until

import popdist_py
from popdist_py import context

pytestmark = pytest.mark.mpi
PROGRAM = Path(__file__).with_name("loss_program.py")


def run(poprun, instances, how, size, **environment):
    """Run the program; return the seconds that instance 0 waited, and its error message."""
    done = poprun(
        "--num-instances", instances, "--num-replicas", instances, "--oversubscribe", PROGRAM, how,
        size, env=environment,
    )  # fmt: skip
    found = re.search(r"\[1,0\]<stdout>:after ([\d.]+) s: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1]), found[2]


@pytest.mark.parametrize("size", [1, pytest.param(1_000_000, marks=pytest.mark.sweep)])
def test_an_instance_that_ended_is_named(poprun, size):
    _, message = run(poprun, 3, "leaves", size)
    assert re.fullmatch(
        rf"all_reduce\(name='loss', op=sum, shape=\({size},\), dtype=float64\): "
        r"instance 2 \(process \d+\) ended",
        message,
    )


def _message_about_instance_1(ended):
    """Wait for instance 1, which makes no call; return the seconds and the message of instance 0.

    Instance 1 leaves when the file ``ended`` exists.
    """
    context.finalize()
    try:
        with mock.patch.dict(os.environ, {"POPDIST_HANG_TIMEOUT": "1.5"}):
            popdist_py.init()
        popdist_py.barrier()
        if popdist_py.getInstanceIndex() == 1:
            wait_until(ended.exists, 60)
            return None
        start = time.monotonic()
        with pytest.raises(popdist_py.InstanceLostError) as error:
            popdist_py.all_reduce(np.ones(1), name="loss")
        return time.monotonic() - start, str(error.value)
    finally:
        ended.touch()
        context.finalize()


def test_an_instance_that_does_not_come_is_named_after_the_time_limit(instances, tmp_path):
    (seconds, message), _ = instances.run(_message_about_instance_1, tmp_path / "ended")
    assert seconds > 1.4
    assert message.endswith("did not make this call within 1.5 s (POPDIST_HANG_TIMEOUT)")
    assert ": instance 1 (process " in message


@pytest.mark.parametrize(
    "environment",
    [
        {"POPDIST_SHARED_MEMORY": "0"},
        pytest.param({"TEST_NUM_HOSTS": "3"}, marks=pytest.mark.sweep),
    ],
    ids=["mpi", "hosts"],
)
def test_mpi_names_it_too(poprun, environment):
    seconds, message = run(poprun, 3, "stays away", 1, POPDIST_HANG_TIMEOUT="2", **environment)
    assert seconds > 1.9
    assert message.endswith(": instance 2 did not make this call within 2 s (POPDIST_HANG_TIMEOUT)")


@pytest.mark.parametrize("how", [pytest.param("leaves", marks=pytest.mark.sweep), "stays away"])
def test_other_hosts_hear_who_is_missing(poprun, how):
    environment = {"TEST_NUM_HOSTS": "2", "POPDIST_HANG_TIMEOUT": "2"}
    _, message = run(poprun, 4, how, 1, **environment)
    assert message.endswith(": instance 3 on another host was lost")


@pytest.mark.parametrize(
    ("late", "calls", "kept"),
    [
        # Instance 0 does not own a slice. Its arrival would tell instance 1 that all results are
        # written.
        pytest.param("read", 0, 1, marks=pytest.mark.sweep),
        # A failed write to the ended instance is not an error.
        ("write", 1, 0),
    ],
)
def test_an_instance_that_ended_after_its_last_copy_spoils_no_result(poprun, late, calls, kept):
    done = poprun(
        *("--num-instances", 3, "--num-replicas", 3, "--oversubscribe"),
        *(PROGRAM.with_name("direct_loss_program.py"), late),
    )
    found = re.search(r"\[1,0\]<stdout>:after (\d) calls, (\d) kept: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    assert (int(found[1]), int(found[2])) == (calls, kept)
    assert re.search(r": instance 2 \(process \d+\) ended$", found[3])
    assert "AssertionError" not in done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("hosts", ["1", "2"])
def test_weights_of_two_steps_are_not_given_out(poprun, warm, hosts):
    done = poprun(
        *("--num-instances", 2, "--num-replicas", 2, "--oversubscribe"),
        *warm,
        PROGRAM.with_name("update_loss_program.py"),
        env={"TEST_NUM_HOSTS": hosts},
    )
    lines = re.findall(r"\[1,0\]<stdout>:(.*)", done.stdout)
    refused = "refused: Another instance was lost during the weight update"
    assert len(lines) == 3, done.stdout + done.stderr
    assert all(line.startswith(refused) for line in lines), lines
