"""The decision about a partition for all options and states (golden file), and single rules."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.partition_states import HOLDER, STATES, pod_in_state

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.environment import InstanceEnvironment
from popdist_py.pods.model.partition_rules import check_request
from popdist_py.pods.model.pod_parts import Attachment, PartitionState, SyncType
from poprun_py.launching.job_ipus import pod_state
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.job_partition import is_temporary, permanent_name, temporary_name
from poprun_py.planning.partition_decision import Action, decide_partition, wanted_request

OWN = temporary_name("host")
NEW = "name a new partition with --vipu-partition, use a partition made with --reconfigurable, or "
JOB = {"num_instances": 2, "num_replicas": 4}


@pytest.fixture
def pod(tmp_path):
    """Return a function that returns the pod in a given state."""
    with contextlib.ExitStack() as opened:

        def now(state):
            store = pod_in_state(tmp_path / str(list(STATES).index(state)), state)
            opened.callback(store.close)
            return replace(pod_state(store), where="POD")

        yield now


def after(use):
    """Return the state of partition ``p`` after the job."""
    if use.action is Action.REFUSE or use.is_temporary:
        return "as before"
    if use.removes:
        return "absent"
    return {"use": "as before", "reset": "reset", "create": "new", "update": "new"}[use.action]


def test_all_options_in_all_states(pod, golden):
    lines = []
    for state in STATES:
        now, rows, reasons = pod(state), [], {}
        for update, reset, remove, named in product(
            (False, True), (None, False, True), (True, False), (True, False)
        ):
            config = LaunchConfig(
                **JOB, update_partition=update, reset_partition=reset, remove_partition=remove,
                vipu_partition="p" if named else None,
            )  # fmt: skip
            use = decide_partition(config, {}, now, new_name=OWN)
            reason = use.reason.replace(OWN, "OWN")
            words = (
                f"update {'yes' if update else 'no'}",
                f"reset {'unset' if reset is None else 'yes' if reset else 'no'}",
                f"remove {'yes' if remove else 'no'}",
                "named" if named else "unnamed",
            )
            number = reasons.setdefault(reason, len(reasons) + 1)
            code = 3 if use.action is Action.REFUSE else 0
            rows.append(
                f"  {words[0]:10} {words[1]:11} {words[2]:10} {words[3]:7} -> {use.action:6} "
                f"exit {code}  after: {after(use):9} ({number})"
            )
        lines += [state, *rows, *(f"  ({n}) {text}" for text, n in reasons.items()), ""]
    golden("decisions.txt", "\n".join(lines))


def test_the_partition_comes_from_the_option_the_variable_or_is_the_only_one(pod):
    now = pod("fits, preconfigured")
    variable = {"IPUOF_VIPU_API_PARTITION_ID": "v"}
    named = decide_partition(LaunchConfig(**JOB, vipu_partition="o"), variable, now, new_name=OWN)
    assert (named.name, named.action) == ("o", Action.CREATE)
    assert decide_partition(LaunchConfig(**JOB), variable, now, new_name=OWN).name == "v"
    only = decide_partition(LaunchConfig(**JOB), {}, now, new_name=OWN)
    assert (only.name, only.action) == ("p", Action.RESET)
    assert "the only partition" in only.sentence
    (partition,) = now.partitions
    others = replace(now, partitions=(partition, replace(partition, name=OWN)))
    assert decide_partition(LaunchConfig(**JOB), {}, others, new_name=OWN).name == "p"
    several = replace(now, partitions=(partition, replace(partition, name="q")))
    refused = decide_partition(LaunchConfig(**JOB), {}, several, new_name=OWN)
    assert refused.is_refused
    assert refused.reason == "use --vipu-partition p: POD has 2 partitions (p, q)"
    larger = replace(LaunchConfig(**JOB), num_replicas=16)
    none_fits = decide_partition(larger, {}, several, new_name=OWN)
    assert none_fits.reason.startswith(
        "name a partition with --vipu-partition or IPUOF_VIPU_API_PARTITION"
    )


@pytest.mark.parametrize("update", [False, True])
def test_a_job_that_is_larger_than_the_pod_gets_no_advice_about_partitions(pod, update):
    now = pod("fits, preconfigured")
    too_many = 2 * len(now.pod.ipus())
    config = LaunchConfig(num_instances=2, num_replicas=too_many, update_partition=update)
    refused = decide_partition(config, {}, now, new_name=OWN)
    assert refused.is_refused
    assert "use a larger pod: " in refused.reason
    assert not {"--update-partition", "--reconfigurable", "--vipu-partition"} & {
        word.strip(":,") for word in refused.reason.split()
    }


def test_a_reconfigurable_partition_that_is_too_small_is_not_told_to_be_reconfigurable(pod):
    now = pod("fits, preconfigured")
    (partition,) = now.partitions
    small = replace(partition, ipus=partition.ipus[:2], reconfigurable=True)
    reasons = []
    for each in (small, replace(small, reconfigurable=False)):
        state = replace(now, partitions=(each,))
        reasons.append(decide_partition(LaunchConfig(**JOB), {}, state, new_name=OWN).reason)
    assert all("add --update-partition yes: partition p does not fit" in text for text in reasons)
    assert ["use a partition made with --reconfigurable" in text for text in reasons] == [
        False,
        True,
    ]


def test_a_launch_without_a_partition_creates_a_temporary_one(pod):
    use = decide_partition(LaunchConfig(**JOB), {}, pod("absent"), new_name=OWN)
    assert (use.name, use.is_temporary, use.removes) == (OWN, True, True)
    assert is_temporary(OWN)
    assert not is_temporary(permanent_name("host"))


@given(
    instances=st.integers(1, 20), replicas=st.integers(1, 20), width=st.sampled_from((1, 2, 4, 16))
)
def test_requests_hold_the_job_and_are_accepted_by_v_ipu(instances, replicas, width):
    config = LaunchConfig(
        num_instances=instances, num_replicas=instances * replicas, ipus_per_replica=width
    )
    request = wanted_request(config, "p")
    needed = instances * replicas * width
    assert needed <= request.size < 2 * needed
    assert not request.reconfigurable or request.size <= LINK_DOMAIN_IPUS
    check_request(request)


def test_numbers_that_are_not_powers_of_two_get_the_next_larger_partition_as_one_gcd():
    config = LaunchConfig(num_instances=3, num_replicas=3)
    request = wanted_request(config, "p")
    assert (request.size, request.num_gcds, request.reconfigurable) == (4, 1, True)
    native = wanted_request(replace(config, sync_type="pod-native-default"), "p")
    assert (native.size, native.num_gcds, native.reconfigurable) == (4, 1, False)
    large = wanted_request(replace(config, num_replicas=96), "p")
    assert (large.size, large.num_gcds, large.reconfigurable) == (128, 1, False)


def test_sync_type_and_domains_decide_about_the_fit(pod):
    now = pod("fits, preconfigured")
    for values in ({"sync_type": "pod-native-default"}, {"num_ilds": 2}):
        config = LaunchConfig(**JOB, **values)
        assert "does not fit" in decide_partition(config, {}, now, new_name=OWN).reason
    spelled = LaunchConfig(**JOB, sync_type="c2-compatible")
    assert wanted_request(spelled, "p").sync_type is SyncType.C2_COMPATIBLE
    assert not decide_partition(spelled, {}, now, new_name=OWN).is_refused


def test_a_refusal_says_how_many_ipus_are_free(pod):
    config = LaunchConfig(num_instances=2, num_replicas=16, vipu_partition="q")
    now = pod("fits, preconfigured")
    use = decide_partition(config, {}, now, new_name=OWN)
    assert use.reason == (
        "remove partition p, or wait with --wait-for-resources: partition q needs 16 IPUs; POD has "
        "16 IPUs, of which 12 are free (partition p of root has 4 IPUs)"
    ).replace("root", now.user)
    assert use.busy
    # IPUs that others hold may become free, but no waiting helps if the pod has too few IPUs.
    never = decide_partition(replace(config, num_replicas=32), {}, now, new_name=OWN)
    assert (never.action, never.busy) == (Action.REFUSE, "")
    assert "POD has 16" in never.reason
    elsewhere = decide_partition(replace(config, vipu_allocation="no"), {}, now, new_name=OWN)
    assert "there is no allocation 'no'" in elsewhere.reason


def test_a_refusal_begins_with_the_partition_that_fits(pod):
    config = LaunchConfig(**JOB, vipu_partition="p")
    now = pod("in use")
    (taken,) = now.partitions
    other = replace(taken, name="q", ipus=now.pod.ipus()[8:12])
    for partition in (taken, replace(taken, num_gcds=4)):
        both = replace(now, partitions=(partition, other))
        use = decide_partition(config, {}, both, new_name=OWN)
        assert use.reason.startswith("use --vipu-partition q, or ")
    updating = replace(config, update_partition=True)
    changed = decide_partition(updating, {}, both, new_name=OWN)
    assert changed.reason.startswith("use --vipu-partition q, or wait with --wait-for-resources: ")
    # A pod without room for the job: a partition that is too small takes its place.
    unheld = replace(both, partitions=(replace(taken, name="r"), other), attachments=())
    larger = LaunchConfig(**JOB, ipus_per_replica=4, vipu_partition="new")
    full = decide_partition(larger, {}, unheld, new_name=OWN)
    assert full.reason.startswith("remove partition r, or wait with --wait-for-resources: ")
    parts = [replace(other, name=f"p{i}", ipus=now.pod.ipus()[i * 4 : i * 4 + 4]) for i in range(4)]
    full = decide_partition(
        replace(config, vipu_partition="new"),
        {},
        replace(now, partitions=tuple(parts)),
        new_name=OWN,
    )
    assert full.reason.startswith("use --vipu-partition p0, or wait with --wait-for-resources: ")
    # A partition that is in use, temporary or broken is not named.
    for each in (
        replace(other, name=OWN),
        replace(other, reconfigurable=True, state=PartitionState.ERROR),
    ):
        use = decide_partition(config, {}, replace(now, partitions=(taken, each)), new_name=OWN)
        assert use.reason.startswith(NEW)


def test_every_refusal_begins_with_a_remedy(pod):
    ways = ("use ", "add ", "remove ", "name ", "ask ", "wait ")
    states = [pod(state) for state in STATES]
    for now, update, reset, replicas in product(
        states, (False, True), (None, False, True), (4, 8, 16, 32)
    ):
        config = LaunchConfig(
            num_instances=2, num_replicas=replicas, update_partition=update, reset_partition=reset
        )
        use = decide_partition(config, {}, now, new_name=OWN)
        assert not use.is_refused or use.reason.startswith(ways), use.reason


def test_scattered_free_ipus_are_not_enough(pod):
    now = pod("fits, reconfigurable")
    (partition,) = now.partitions
    held = tuple(
        Attachment(id="", partition="p", ipus=(ipu,), holder=HOLDER, since=0.0) for ipu in (0, 4)
    )
    use = decide_partition(LaunchConfig(**JOB), {}, replace(now, attachments=held), new_name=OWN)
    assert use.busy.endswith(
        " and 1 more job: this job needs 4 IPUs together, and 6 of the 8 IPUs are free"
    )
    assert (use.partition, use.num_ilds) == (partition, 1)
    parts = tuple(
        replace(partition, name=f"p{i}", ipus=now.pod.ipus()[i * 4 : i * 4 + 1]) for i in range(4)
    )
    use = decide_partition(
        LaunchConfig(**JOB, vipu_partition="q"), {}, replace(now, partitions=parts), new_name=OWN
    )
    assert (
        "POD has 16 IPUs, of which 12 are free, but not in one suitable block (partition p0 of "
        in use.busy
    )


def test_a_launch_within_an_instance_inherits_its_ipus(pod):
    now = pod("fits, preconfigured")
    holder = replace(HOLDER, run_id="outer")
    around = Attachment(id="", partition="p", ipus=(0, 1, 2, 3), holder=holder, since=0.0)
    now = replace(now, attachments=(around,))
    outer = {
        "IPUOF_VIPU_API_PARTITION_ID": "p",
        "IPUOF_VIPU_API_GCD_ID": "1",
        "POPRUN_RUN_ID": "outer",
        **InstanceEnvironment(
            num_total_replicas=4, num_local_replicas=2, replica_index_offset=2
        ).to_environ(),
    }
    for replicas, ipus in ((2, (2, 3)), (1, (2,))):
        use = decide_partition(LaunchConfig(num_replicas=replicas), outer, now, new_name=OWN)
        assert use.inherited is not None
        assert (use.action, use.inherited.ipus, use.removes) == (Action.INHERIT, ipus, False)
        assert use.variables(7)["IPUOF_VIPU_API_GCD_ID"] == "1"
    larger = decide_partition(LaunchConfig(num_replicas=4), outer, now, new_name=OWN)
    assert larger.is_refused
    assert not larger.busy
    assert (
        "but the job runs in an instance of other.py (process 4711), which has only"
        in larger.reason
    )
    # The rule does not apply to another partition.
    named = LaunchConfig(**JOB, vipu_partition="q")
    assert decide_partition(named, outer, now, new_name=OWN).action is Action.CREATE
    other = {**outer, "POPRUN_RUN_ID": "another"}
    assert decide_partition(LaunchConfig(**JOB), other, now, new_name=OWN).busy


def test_link_domains_are_those_of_the_pod(pod):
    now = pod("absent")
    (cluster,) = now.pod.clusters
    halves = replace(now.pod, clusters=(replace(cluster, num_ilds=2),))
    config = LaunchConfig(num_instances=2, num_replicas=16, vipu_partition="q")
    assert decide_partition(config, {}, now, new_name=OWN).num_ilds == 1
    assert decide_partition(config, {}, replace(now, pod=halves), new_name=OWN).num_ilds == 2
