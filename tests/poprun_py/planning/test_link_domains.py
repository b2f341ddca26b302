"""The IPU-Link domains of a job, their instances, and the variables that describe them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.plans import plan_blindly

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from poprun_py import LaunchConfig, StartError, UsageError
from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.planning.installed_mpi import OPEN_MPI_5, Mpi
from poprun_py.planning.instance_variables import popdist_variables, target_options
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.plan_file import plan_from_json, plan_to_json
from poprun_py.planning.plan_warnings import plan_warnings


def config(replicas, instances, width=1, **options):
    return LaunchConfig(
        num_replicas=replicas, num_instances=instances, ipus_per_replica=width, **options
    )


def hosts(number):
    return parse_host_list(f"h[1-{number}]", source="test") if number > 1 else (LOCALHOST,)


def domains(replicas, instances, width=1, **options):
    return make_topology(config(replicas, instances, width, **options), (LOCALHOST,)).num_ilds


# The numbers R, P, I, D, H of a job; IPUs, replicas, instances of a domain; IPUs of an instance.
@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ((16, 4, 4, 1, 4), (64, 16, 4, 16)),
        ((64, 1, 16, 1, 4), (64, 64, 16, 4)),
        ((16, 8, 2, 2, 2), (128, 8, 1, 64)),
        ((32, 4, 8, 2, 4), (128, 16, 4, 16)),
        ((32, 8, 4, 4, 4), (256, 8, 1, 64)),
        ((256, 1, 64, 4, 16), (256, 64, 16, 4)),
        ((128, 1, 64, 2, 8), (128, 64, 32, 2)),
        ((256, 1, 128, 4, 16), (256, 64, 32, 2)),
    ],
)
@pytest.mark.parametrize("is_asked_for", [True, False])
def test_published_jobs_have_the_domains_of_their_pods(asked, shape, is_asked_for):
    replicas, width, instances, num_ilds, num_hosts = asked
    options = {"num_ilds": num_ilds} if is_asked_for else {}
    made = make_topology(config(replicas, instances, width, **options), hosts(num_hosts))
    assert made.num_ilds == num_ilds
    for domain in range(num_ilds):
        own = [each for each in made.instances if each.ild == domain]
        assert (
            made.num_ipus,
            sum(len(each.replicas) for each in own),
            len(own),
            len(own[0].ipus),
        ) == shape
    assert [each.host_index for each in made.instances] == [
        i * num_hosts // instances for i in range(instances)
    ]


@pytest.mark.parametrize(
    ("job", "number"),
    [
        ((1, 1), 1), ((64, 1), 1), ((65, 65), 5), ((65, 5), 5), ((66, 2), 2), ((96, 3), 3),
        ((128, 6 * 128 // 6), 2), ((130, 10), 5), ((32, 2, 4), 2), ((16, 16, 16), 4),
        # If an instance is larger than a domain, there is a domain for each instance.
        ((128, 1), 1), ((256, 2), 2), ((4096, 32), 32), ((64, 1, 4), 1),
    ],
)  # fmt: skip
def test_the_fewest_domains_that_hold_the_ipus_and_divide_the_instances(job, number):
    assert domains(*job) == number


@given(st.integers(1, 96), st.integers(1, 40), st.sampled_from([1, 2, 4, 16]), st.integers(1, 4))
def test_no_replica_and_no_instance_crosses_a_domain(instances, local, width, num_hosts):
    job = config(instances * num_hosts * local, instances * num_hosts, width)
    made = make_topology(job, hosts(num_hosts))
    size, number = made.ipus_per_ild, made.num_ilds
    assert size * number == made.num_ipus
    for each in made.instances:
        assert each.ild == each.index * number // made.num_instances
        assert {ipu // size for ipu in (each.ipus[0], each.ipus[-1])} == {each.ild}
        assert {r * number // made.num_replicas for r in each.replicas} == {each.ild}
    if local * width <= LINK_DOMAIN_IPUS:
        assert size <= LINK_DOMAIN_IPUS
        fewer = [n for n in range(1, number) if made.num_instances % n == 0]
        assert all(made.num_ipus / n > LINK_DOMAIN_IPUS for n in fewer)
    else:
        assert number == made.num_instances


@pytest.mark.parametrize(
    ("job", "num_ilds", "said"),
    [
        ((2, 2), 4, "num_instances=2 cannot be split evenly over num_ilds=4: expected a number"),
        ((128, 128), 1, "num_ilds=1 puts 128 of 128 IPUs into each IPU-Link domain, but a "
         "domain has at most 64 IPUs: expected 2 or 4 or 8 or 16 domains, a number that divides "),
        ((16, 16, 16), 2, "num_ilds=2 puts 128 of 256 IPUs into each IPU-Link domain, but a "
         "domain has at most 64 IPUs: expected 4 or 8 or 16 domains, a number that divides"),
        ((256, 4), 2, "num_ilds=2 puts 128 of 256 IPUs into each IPU-Link domain, but a "
         "domain has at most 64 IPUs: expected 4 domains, a number that divides num_instances=4"),
        ((128, 1), 1, "num_ilds=1 puts 128 of 128 IPUs into each IPU-Link domain, but a "
         "domain has at most 64 IPUs: expected 2 or more domains, and a multiple of that "),
    ],
)  # fmt: skip
def test_domains_that_the_job_does_not_fit_are_refused(job, num_ilds, said):
    with pytest.raises(UsageError) as caught:
        config(*job, num_ilds=num_ilds)
    assert str(caught.value).startswith(said)


# --- with a partition ---------------------------------------------------------------------------


def test_the_domains_of_the_partition_are_those_of_the_job():
    assert make_topology(config(8, 4), (LOCALHOST,), num_ilds=2).num_ilds == 2
    assert make_topology(config(8, 4, num_ilds=4), (LOCALHOST,), num_ilds=4).num_ilds == 4


def test_a_partition_of_other_domains_than_asked_for_is_refused():
    with pytest.raises(StartError) as caught:
        make_topology(config(8, 4, num_ilds=4), (LOCALHOST,), num_ilds=1)
    assert str(caught.value) == (
        "num_ilds=4 does not match the partition, which has 1 IPU-Link domain; give "
        "--num-ilds 1, omit the option, or add --update-partition yes to replace the partition"
    )


def test_a_partition_whose_domains_do_not_divide_the_instances_is_refused():
    with pytest.raises(StartError) as caught:
        make_topology(config(128, 1), (LOCALHOST,), num_ilds=2)
    assert str(caught.value).startswith(
        "num-instances = 1 (the default) cannot be split evenly over the 2 IPU-Link domains of "
        "the partition: expected a multiple of 2 instances"
    )


# --- plans --------------------------------------------------------------------------------------


def planned(job):
    return plan_blindly(
        job, hosts=(LOCALHOST,), mpi=Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5), environ={}
    )


def test_an_instance_that_is_larger_than_a_domain_runs_with_a_warning():
    (said,) = plan_warnings(planned(config(128, 1, program=("x",))))
    assert said == (
        "num-instances = 1 (the default): one instance has 128 IPUs, but an IPU-Link domain "
        "has only 64 IPUs, so this job cannot run on real IPUs; start at least 2 instances"
    )
    assert plan_warnings(planned(config(64, 1, program=("x",)))) == ()


def test_a_saved_plan_keeps_the_domains_of_its_partition():
    data = plan_to_json(planned(config(8, 4, num_ilds=2, program=("x",))))
    # The number of domains as a partition would decide it.
    del data["options"]["num_ilds"]
    again = plan_from_json(json.loads(json.dumps(data)), {})
    assert again.topology.num_ilds == 2
    assert [each.instance.ild for each in again.instances] == [0, 0, 1, 1]


@pytest.mark.parametrize("number", [0, -1, 3, 8, 2.0, None, "2", [2]])
def test_a_saved_plan_with_domains_that_do_not_fit_is_refused(number):
    data = plan_to_json(planned(config(8, 4, program=("x",))))
    with pytest.raises(
        UsageError,
        match=r"num_ilds is .*, but the options of the plan say " r"1; export the plan again",
    ):
        plan_from_json({**data, "num_ilds": number}, {})


def test_a_saved_plan_with_too_many_ipus_in_a_domain_is_refused():
    data = plan_to_json(planned(config(128, 4, program=("x",))))
    assert plan_from_json(data, {}).topology.num_ilds == 2
    with pytest.raises(
        UsageError, match="launch plan: num_ilds is 1, but the options of the plan say"
    ):
        plan_from_json({**data, "num_ilds": 1}, {})


# --- what instances are told --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "size", "links"),
    [
        ((4, 1), "4", ("default", "mesh")),
        ((32, 2), "32", ("default", "mesh")),
        ((16, 4, 4), "64", ("slidingWindow", "torus")),
        ((256, 64), "64", ("slidingWindow", "torus")),
        ((96, 2), "48", ("default", "mesh")),
        ((128, 1), "64", ("slidingWindow", "torus")),
    ],
)
def test_target_options_name_the_links_of_a_domain(job, size, links):
    made = make_topology(config(*job), (LOCALHOST,))
    told = json.loads(target_options(made, {"POPLAR_TARGET_OPTIONS": '{"a":"b","gatewayMode":""}'}))
    assert told == {
        "a": "b", "ipuLinkDomainSize": size, "ipuLinkConfiguration": links[0],
        "ipuLinkTopology": links[1], "gatewayMode": "true",
        "instanceSize": str(len(made.instances[0].ipus)),
    }  # fmt: skip


@pytest.mark.parametrize(("job", "parent"), [((64, 16), "126"), ((16, 4), "30"), ((128, 4), None)])
def test_only_a_job_in_one_domain_has_a_parent_device(job, parent):
    made = make_topology(config(*job), (LOCALHOST,))
    told = popdist_variables(config(*job), made, made.instances[0])
    assert told.get("POPDIST_NODE_DEVICE_ID") == parent
