"""``--wait-for-resources`` waits for IPUs that others have, without a job."""

from __future__ import annotations

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.partition_states import HOLDER, pod_in_state
from support.launcher.plans import plan_blindly

from poprun_py.errors import StartError
from poprun_py.launching import launch_planning
from poprun_py.launching.job_ipus import ipus_of_job
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.plan_warnings import plan_warnings

JOB = {"num_instances": 2, "num_replicas": 4, "vipu_partition": "p"}


@pytest.fixture
def pod(tmp_path):
    """Give a function that makes a pod in a state and returns its store."""
    stores = []

    def made(state):
        stores.append(pod_in_state(tmp_path / "pods", state))
        return stores[-1]

    yield made
    for store in stores:
        store.close()


def waiting(tmp_path, heard, wait="forever", **values):
    """Return the context of a job that waits; ``heard`` is called with the reason."""
    config = LaunchConfig(program=("train.py",), wait_for_resources=wait, **{**JOB, **values})
    planned = plan_blindly(config, environ={"POPRUN_PODS": str(tmp_path / "pods")})
    console = KeptConsole()
    console.waiting = lambda _, reason: heard(reason) if reason else None
    return ipus_of_job(planned, "run", console, Wait(config, console))


@pytest.mark.parametrize("state", ["fits, preconfigured", "half in use, reconfigurable"])
def test_a_job_waits_until_others_give_back_what_they_have(pod, tmp_path, state):
    store = pod(state)
    taken = store.attach("p", 4, HOLDER)
    said = []

    def heard(line):
        said.append(line)
        store.detach(taken)

    with waiting(tmp_path, heard) as held:
        assert len(held.attachment.ipus) == 4
    (line,) = said
    assert line.startswith("for IPUs: partition p is in use by other.py of holder (process")
    assert not line.endswith("another partition")


def test_free_ipus_that_are_no_group_are_waited_for(pod, tmp_path):
    store = pod("fits, reconfigurable")
    low, _ = (store.attach("p", 1, HOLDER, ipus=(ipu,)) for ipu in (1, 6))
    with waiting(tmp_path, lambda _: store.detach(low)) as held:
        assert held.attachment.ipus == (0, 1, 2, 3)


def test_a_partition_that_others_made_for_themselves_is_waited_for(pod, tmp_path):
    store = pod("other GCDs")
    values = {"vipu_partition": "q", "num_replicas": 16}
    with waiting(tmp_path, lambda _: store.remove_partition("p"), **values) as held:
        assert held.partition.name == "q"


@pytest.mark.parametrize("state", ["in use", "fits, reconfigurable"])
def test_waiting_has_an_end(pod, tmp_path, state):
    store = pod(state)
    if state != "in use":
        for ipu in (1, 6):
            store.attach("p", 1, HOLDER, ipus=(ipu,))
    message = r" p .* \(the time of wait_for_resources=0.05 is over\)$"
    with pytest.raises(StartError, match=message), waiting(tmp_path, str, 0.05):
        pytest.fail("the job has a partition")


def test_what_no_waiting_would_help_is_refused_at_once(pod, tmp_path):
    pod("absent")
    with (
        pytest.raises(
            StartError,
            match=r"^ask for fewer IPUs, or use a larger pod: .* its largest group has 16 IPUs",
        ),
        waiting(tmp_path, pytest.fail, num_replicas=32),
    ):
        pytest.fail("the job has a partition")


def test_a_launch_is_planned_for_what_it_waits_for(pod, tmp_path):
    pod("in use")
    environ = {"POPRUN_PODS": str(tmp_path / "pods")}
    config = LaunchConfig(**JOB, program=("true",), oversubscribe=True)
    with pytest.raises(StartError, match=r"in use by other\.py"):
        launch_planning.plan(config, environ=environ, contact_hosts=True)
    waits = LaunchConfig(**JOB, program=("true",), oversubscribe=True, wait_for_resources="forever")
    planned = launch_planning.plan(waits, environ=environ, contact_hosts=True)
    assert planned.topology.num_ilds == 1
    assert not any("not launched" in each for each in plan_warnings(planned))
