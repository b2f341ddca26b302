"""A job's partition from before it starts until after its end, without a job."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from dataclasses import replace

import pytest
from support.launcher.consoles import KeptConsole
from support.launcher.partition_states import FITTING, HOLDER, pod_in_state
from support.launcher.plans import plan_blindly

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.model.pod_errors import InUseError, NotEnoughIpusError, UnreachableError
from poprun_py.errors import StartError
from poprun_py.launching.job_ipus import ipus_of_job
from poprun_py.launching.launch_planning import plan
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.job_partition import HeldPartition, temporary_name
from poprun_py.planning.partition_decision import refusal
from poprun_py.planning.plan_warnings import plan_warnings

JOB = {"num_instances": 2, "num_replicas": 4, "vipu_partition": "p"}


@pytest.fixture
def console():
    return KeptConsole()


@pytest.fixture
def said(console):
    """All messages of the launcher, without their kinds."""

    class Messages(list):
        def append(self, message):
            super().append(message[1])

    console.said = Messages()
    return console.said


@pytest.fixture
def job(tmp_path, console, said):
    """Give a function that makes a pod in a state, and holds a job's partition in a context."""
    with contextlib.ExitStack() as opened:

        def held(state, create_seconds=0.0, progress=None, waited_seconds=0.0, **values):
            store = pod_in_state(tmp_path / "pods", state, create_seconds=create_seconds)
            opened.callback(store.close)
            config = LaunchConfig(program=("train.py",), **{**JOB, **values})
            planned = plan_blindly(config, environ={"POPRUN_PODS": str(tmp_path / "pods")})
            wait = Wait(config, console)
            wait.seconds = waited_seconds
            if progress is not None:
                console.waiting = progress
            return store, ipus_of_job(planned, "run", console, wait)

        yield held


def test_a_job_is_seen_by_others_while_it_runs(job):
    store, partition = job("absent")
    with partition as held:
        (attachment,) = store.attachments()
        assert attachment.ipus == (0, 1, 2, 3)
        assert (attachment.holder.program, attachment.holder.run_id) == ("train.py", "run")
        assert held.variables(1)["IPUOF_VIPU_API_GCD_ID"] == "1"
        assert held.variables(1)["POPDIST_NODE_DEVICE_ID"] is None
    assert store.partitions() == ()


def test_the_parent_device_of_a_reconfigurable_partition_is_the_one_that_is_attached(job):
    store, partition = job("half in use, reconfigurable")
    with partition as held:
        # 8 IPUs: the fours are 12 and 13, and the first is taken.
        assert held.variables(0)["POPDIST_NODE_DEVICE_ID"] == "13"
        assert held.first_ipu == 4
    assert len(store.attachments()) == 1


def test_whatever_ends_the_job_everything_is_given_back(job):
    store, partition = job("absent")
    with pytest.raises(KeyboardInterrupt), partition:
        raise KeyboardInterrupt
    assert store.partitions() == store.attachments() == ()


def test_sigterm_unwinds_and_the_handler_of_before_is_back(job):
    store, partition = job("absent")
    with pytest.raises(SystemExit) as ended, partition:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert store.partitions() == ()


def test_a_partition_that_cannot_be_changed_is_as_before(job, monkeypatch):
    store, partition = job("other GCDs", update_partition=True)
    create = FolderStore.create_partition

    def refuses(self, request):
        if request.num_gcds == 2:
            raise NotEnoughIpusError("somebody was faster")
        return create(self, request)

    monkeypatch.setattr(FolderStore, "create_partition", refuses)
    with pytest.raises(StartError, match="somebody was faster"), partition:
        pytest.fail("the job has a partition")
    kept = store.partition("p")
    assert (kept.size, kept.num_gcds, kept.num_replicas) == (4, 4, 4)


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("call", "is_done"),
    [
        ("remove_partition", False),
        ("remove_partition", True),
        ("create_partition", False),
        ("create_partition", True),
        ("attach", False),
    ],
)
def test_a_signal_while_a_partition_is_changed_leaves_it_as_before(
    job, monkeypatch, call, is_done, number, removes
):
    store, partition = job("other GCDs", update_partition=True, remove_partition=removes)
    real, calls = getattr(FolderStore, call), []

    def interrupted(*words, **values):
        calls.append(call)
        if len(calls) > 1 or is_done:
            real(*words, **values)
        if len(calls) == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(FolderStore, call, interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)), partition:
        pytest.fail("the job has a partition")
    kept = store.partition("p")
    assert (kept.size, kept.num_gcds, kept.num_replicas) == (4, 4, 4)
    assert store.attachments() == ()


@pytest.mark.parametrize("removes", [True, False])
def test_a_job_that_had_its_changed_partition_keeps_or_removes_it(job, removes):
    store, partition = job("other GCDs", update_partition=True, remove_partition=removes)
    with pytest.raises(KeyboardInterrupt), partition:
        raise KeyboardInterrupt
    assert [each.num_gcds for each in store.partitions()] == ([] if removes else [2])


def test_what_another_job_takes_in_between_is_decided_anew(job, monkeypatch, said):
    store, partition = job("fits, preconfigured")
    reset = FolderStore.reset_partition

    def loses(self, name):
        store.attach("p", 4, HOLDER)
        return reset(self, name)

    monkeypatch.setattr(FolderStore, "reset_partition", loses)
    with pytest.raises(StartError, match=r"in use by other.py of holder \(process "), partition:
        pytest.fail("the job has a partition")
    assert any(line.endswith("; the launcher chooses a partition again") for line in said)


def test_the_wait_for_a_partition_has_an_end(job):
    store, partition = job("absent", create_seconds=60.0, vipu_server_timeout=1)
    with pytest.raises(StartError, match="partition p is still PENDING after 1 s"), partition:
        pytest.fail("the job has a partition")
    assert store.partitions() == ()


def test_a_closed_stderr_of_a_program_that_launches_is_no_error(job, monkeypatch):
    _, partition = job("absent")
    monkeypatch.setattr(sys, "stderr", None)
    with partition as held:
        assert held.attachment.ipus == (0, 1, 2, 3)


def test_a_plan_for_other_domains_is_refused(job, monkeypatch):
    store, partition = job("fits, preconfigured")
    monkeypatch.setattr(
        FolderStore, "partitions", lambda _: (replace(store.partition("p"), num_ilds=2),)
    )
    with pytest.raises(StartError, match="has 2 IPU-Link domains, but the plan was made for"):
        partition.__enter__()
    assert FITTING.num_ilds is None


def test_without_a_pod_nothing_is_asked_and_one_line_says_so(tmp_path, console, said):
    environ = {"POPRUN_PODS": str(tmp_path / "nowhere")}
    for values, variables in (
        ({}, {}),
        ({"pod": "none"}, {"POPRUN_POD": "none"}),
        ({"offline_mode": True}, {"POPRUN_POD": "none"}),
    ):
        config = LaunchConfig(program=("p",), **values)
        planned = plan_blindly(config, environ=environ)
        with ipus_of_job(planned, "r", console, Wait(config, console)) as held:
            assert held.variables(0) == variables
    assert said == ["no pod is configured: the IPUs are emulated without a partition"]


def test_a_job_waits_until_the_ipus_it_needs_are_free(job):
    told = []

    def progress(_, reason):
        told.append(reason)
        if len(told) == 2:
            store.detach(taken)

    store, partition = job("fits, preconfigured", wait_for_resources="forever", progress=progress)
    taken = store.attach("p", 4, HOLDER)
    with partition as held:
        assert held.partition.generation == 1
    assert told[0].startswith("for IPUs: partition p is in use by other.py of holder")
    assert (len(told), told[-1]) == (3, "")


def test_a_server_that_goes_while_a_job_waits_is_waited_for_too(job, monkeypatch):
    told = []

    def progress(_, reason):
        told.append(reason)
        if len(told) == 1:
            monkeypatch.setattr(FolderStore, "partitions", gone)
        elif len(told) == 2:
            monkeypatch.setattr(FolderStore, "partitions", there)
            store.detach(taken)

    def gone(_):
        raise UnreachableError("nobody answers")

    there = FolderStore.partitions
    store, partition = job("fits, preconfigured", wait_for_resources="forever", progress=progress)
    taken = store.attach("p", 4, HOLDER)
    with partition:
        assert "nobody answers" in told[1]


def test_a_server_that_goes_after_another_job_took_the_ipus_is_waited_for_too(job, monkeypatch):
    told = []

    def progress(_, reason):
        told.append(reason)
        if len(told) == 1:
            store.detach(taken)
            monkeypatch.setattr(FolderStore, "attach", another_job_was_faster)
        elif "nobody answers" in reason:
            monkeypatch.setattr(FolderStore, "partitions", there)

    def another_job_was_faster(*_, **__):
        monkeypatch.setattr(FolderStore, "attach", attach)
        monkeypatch.setattr(FolderStore, "partitions", gone)
        raise InUseError("the IPUs are in use")

    def gone(_):
        raise UnreachableError("nobody answers")

    attach, there = FolderStore.attach, FolderStore.partitions
    store, partition = job("fits, preconfigured", wait_for_resources="forever", progress=progress)
    taken = store.attach("p", 4, HOLDER)
    with partition as held:
        assert held.partition.name == "p"
    assert [reason.removeprefix("for IPUs: ")[:14] for reason in told] == [
        "partition p is", "", "nobody answers", ""
    ]  # fmt: skip


def test_the_time_for_waiting_counts_that_for_cores(job, console):
    store, partition = job("in use", wait_for_resources=600.0, waited_seconds=599.9)
    with pytest.raises(StartError) as refused, partition:
        pytest.fail("the job has its IPUs")
    assert str(refused.value).endswith(" (the time of wait_for_resources=600.0 is over)")
    assert len([reason for _, reason in console.waits if reason.startswith("for IPUs: ")]) == 1
    assert len(store.attachments()) == 1


def test_what_was_made_anew_under_the_name_stays(job):
    store, partition = job("absent")
    with partition:
        store.remove_partition("p", force=True)
        made = store.create_partition(FITTING)
    assert store.partitions() == (made,)


def test_what_a_dead_launch_of_another_user_made_is_not_counted_as_free(job):
    store, partition = job("absent", num_replicas=16)
    dead = temporary_name(socket.gethostname()).rpartition("_")[0] + "_1"
    store.with_user("alice").create_partition(replace(FITTING, name=dead))
    with (
        pytest.raises(StartError, match=f"12 are free .partition {dead} of alice has 4"),
        partition,
    ):
        pytest.fail("the job has IPUs that it cannot have")


def test_ipus_of_a_job_are_numbered_domain_by_domain(job):
    store, _ = job("absent")
    made = store.create_partition(replace(FITTING, name="wide", size=8, num_gcds=1))
    wide = replace(made, num_ilds=2)
    held = HeldPartition(where="POD", partition=wide, attachment=store.attach("wide", 8, HOLDER))
    # Three of each domain, which has four.
    assert [held.ipus(range(0, 3), 0, 3), held.ipus(range(3, 6), 1, 3)] == [range(3), range(4, 7)]
    assert HeldPartition().ipus(range(3, 6), 1, 3) == range(3, 6)


def test_what_a_plan_was_refused_for_is_no_warning_when_it_is_launched(monkeypatch):
    monkeypatch.setenv("POPRUN_POD", "none")
    config = LaunchConfig(program=("true",))
    planned = replace(plan(config), partition=refusal("POD", "nothing is free"))
    said = "this plan can be shown but not launched: nothing is free"
    assert said in plan_warnings(planned)
    assert said not in plan_warnings(planned, is_launched=True)
    busy = replace(planned.partition, busy="others")
    waits = replace(planned, partition=busy, config=replace(config, wait_for_resources="forever"))
    assert said not in plan_warnings(waits)
