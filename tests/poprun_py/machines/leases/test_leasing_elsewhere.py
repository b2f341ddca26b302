"""A job plans around the leases on its other hosts, waits for cores there, or is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from support.launcher.plans import plan_blindly
from support.launcher.sysfs_trees import snapshot

from poprun_py.errors import StartError
from poprun_py.launching import wait_for_resources
from poprun_py.launching.job_cores import left_by_others, wait_for_hosts
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.machines.lease_files import JobProcess, LeaseRecord, QueueRecord
from poprun_py.machines.remote_leases import OtherJobs
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.launch_config import LaunchConfig

MACHINE = snapshot("example")
ALL = tuple(sorted(MACHINE.allowed_cpus))
HOSTS = (LOCALHOST, Host(name="b"))
PROBED = ProbedHosts(shell=Shell(words=("ssh",)), machines={}, hostnames={})


def holding(*cpus):
    holder = JobProcess(pid=7, process_start=3, program="other.py", run_id="r")
    return LeaseRecord("lease-x", "ann", holder, cpus, (0,), time.time())


WAITER = QueueRecord("ticket-x", "bob", JobProcess(8, 3, "next.py"), 1, 1.0)


@pytest.fixture
def job(monkeypatch):
    """Plan beside other jobs on host b, which differ at each probe; waiting advances the clock."""
    said = SimpleNamespace(log=[], warn=[], tell=[])
    clock = [0.0]
    monkeypatch.setattr(wait_for_resources.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        wait_for_resources.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s)
    )

    def plan(*looks, cores=1, **options):
        config = LaunchConfig(
            program=("x",), num_instances=2, num_replicas=2, cores_per_instance=cores, **options
        )
        told = [{"b": OtherJobs(*look)} if look else {} for look in looks]
        console = SimpleNamespace(**{name: lines.append for name, lines in vars(said).items()})
        console.waiting = lambda *wait: waits.append(wait)
        alone = plan_blindly(config, hosts=HOSTS, machines=(MACHINE, MACHINE), probed=PROBED)
        wait = Wait(config, console)
        return wait_for_hosts(alone, told.pop(0), lambda: told.pop(0), console, wait)

    waits = []
    plan.said, plan.clock, plan.waits = said, clock, waits
    return plan


def test_leases_on_a_host_change_the_plan_for_that_host_only(job):
    here, there = job([(holding(*ALL[:1]),)])
    assert here == MACHINE
    assert set(ALL[:1]) <= there.held_cpus
    assert (
        "other jobs hold CPUs of host b: ann's other.py (run r, pid 7) has held CPU"
        in job.said.tell[0]
    )


def test_leases_that_do_not_change_the_plan_are_only_logged(job):
    job([(holding(ALL[-1]),)])
    assert (len(job.said.log), job.said.tell) == (1, [])


def test_an_error_names_the_host_and_the_other_jobs(job):
    with pytest.raises(StartError) as caught:
        job([(holding(*ALL),)])
    assert str(caught.value) == (
        "this job got no CPUs; add --share-cores yes or --wait-for-resources: ann's run r (pid "
        "7) holds CPUs 0-63 of host b"
    )
    with pytest.raises(
        StartError, match=r"bob's next.py \(pid 8\) is ahead in the queue for " r"CPUs of host"
    ):
        job([(), (WAITER,)])


def test_waiting_probes_the_host_until_enough_cpus_are_free(job):
    full = [(holding(*ALL),)]
    assert job(full, full, [], wait_for_resources="forever") == (MACHINE,) * 2
    assert [(seconds, reason[:26]) for seconds, reason in job.waits] == [
        (0, "for CPUs of host b: ann's "), (3, "for CPUs of host b: ann's "), (6, "")
    ]  # fmt: skip


def test_waiting_has_a_time_out(job):
    full = [(holding(*ALL),)]
    with pytest.raises(
        StartError, match=r"of host b \(the time of wait_for_resources=4 is " r"over\)$"
    ):
        job(full, full, full, wait_for_resources=4)
    assert job.clock == [4.0]


@pytest.mark.parametrize("options", [{"cores": None}, {"share_cores": "yes"}])
def test_a_job_that_shares_is_planned_on_the_whole_machine(job, options):
    here, there = job([(holding(*ALL),)], **options)
    assert (here, there.held_cpus, there.sharing_jobs) == (MACHINE, frozenset(), (set(ALL),))
    # A warning follows when the host's first instance takes the lease.
    assert vars(job.said) == {"log": [], "warn": [], "tell": []}


def test_the_cores_of_a_shareable_lease_on_a_host_are_shared(job):
    shareable = holding(*ALL)._replace(is_shareable=True)
    assert job([(shareable,)])[1].sharing_jobs == (set(ALL),)
    with pytest.raises(StartError, match="of host b"):
        job([(shareable,)], share_cores="no")


def test_leases_on_a_host_with_unknown_hardware_are_ignored():
    config = LaunchConfig(program=("x",), num_instances=2, num_replicas=2, share_cores="no")
    other_jobs = {"b": OtherJobs((holding(*ALL),))}
    unknown = plan_blindly(config, hosts=HOSTS, machines=(MACHINE, None), probed=PROBED)
    assert left_by_others(unknown, other_jobs).machines == (MACHINE, None)
    known = plan_blindly(config, hosts=HOSTS, machines=(MACHINE, MACHINE), probed=PROBED)
    with pytest.raises(StartError, match="CPUs 0-63 of host b"):
        left_by_others(known, other_jobs)
