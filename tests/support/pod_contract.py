"""What every store of a pod does: one body of tests, run over each of them.

A subclass gives the fixture ``opened``: called with a Pod, it makes that pod and returns a function
that opens it, each time anew, for a user: ``open_as = opened(pod); store = open_as("alice")``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    NameTakenError,
    NotAllowedError,
    NotEnoughIpusError,
    PodError,
    UnknownNameError,
)
from popdist_py.pods.model.pod_parts import (
    Allocation,
    Cluster,
    Holder,
    OperationState,
    PartitionRequest,
    PartitionState,
    SyncType,
)

__all__ = ["POD16", "POD128", "PodContract", "holder"]

POD16 = system_pod("POD16", "lab", ["h1", "h2"])
POD128 = system_pod("POD128", "rack", ["h1", "h2"])


def holder(program: str = "train.py", user: str = "alice") -> Holder:
    return Holder(host="h1", pid=4321, user=user, program=program, run_id="r1")


def _ask(name="p", size=4, **more):
    return PartitionRequest(name=name, size=size, **more)


class PodContract:
    """The contract of ``PodStore``."""

    def test_a_pod_is_as_it_was_described(self, opened):
        assert opened(POD16)("alice").pod() == POD16

    def test_a_partition_is_as_asked_and_seen_by_all(self, opened):
        open_as = opened(POD128)
        asked = _ask("p", 128, num_gcds=4, num_replicas=32, sync_type=SyncType.POD_NATIVE_DEFAULT)
        made = open_as("alice").create_partition(asked)
        assert made == open_as("bob").partition("p") == open_as("bob").partitions()[0]
        assert (made.size, made.num_ilds, made.num_gcds, made.num_replicas) == (128, 2, 4, 32)
        assert (made.cluster, made.allocation, made.owner) == ("c128", "a128", "alice")
        assert (made.state, made.operation) == (PartitionState.ACTIVE, OperationState.IDLE)
        assert made.sync_type is SyncType.POD_NATIVE_DEFAULT
        assert made.ipus == POD128.ipus()
        assert made.hosts == ("h1", "h2")

    def test_partitions_are_listed_by_name_and_share_nothing(self, opened):
        store = opened(POD16)("alice")
        for name in ("z", "a", "m"):
            store.create_partition(_ask(name))
        listed = store.partitions()
        assert [each.name for each in listed] == ["a", "m", "z"]
        ipus = [ipu for each in listed for ipu in each.ipus]
        assert len(set(ipus)) == len(ipus) == 12

    @pytest.mark.parametrize(
        ("asked", "error", "words"),
        [
            (_ask(size=3), InvalidRequestError, "size is 3, which is not a power of two"),
            (_ask(name="a b"), InvalidRequestError, "'a b'"),
            (_ask(size=32), NotEnoughIpusError, "needs 32 IPUs, but allocation a16 has 16 IPUs"),
            (_ask(num_ilds=2), InvalidRequestError, "a16 is 1"),
            (_ask(allocation="b"), UnknownNameError, "'b'"),
            (_ask(cluster="b"), UnknownNameError, "'b'"),
            (_ask(num_gcds=2, reconfigurable=True), InvalidRequestError, "1 GCD"),
        ],
    )
    def test_what_cannot_be_is_refused(self, opened, asked, error, words):
        store = opened(POD16)("alice")
        with pytest.raises(error, match=words) as caught:
            store.create_partition(asked)
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)
        assert store.partitions() == ()

    @pytest.mark.parametrize("asks_first", [False, True])
    def test_a_forked_child_gives_back_nothing_of_its_parent(self, opened, asks_first):
        store = opened(POD16)("alice")
        store.create_partition(_ask("p", 4))
        held = store.attach("p", 2, holder())
        if not (child := os.fork()):
            try:
                if asks_first:
                    store.partitions()
                store.detach(held)
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [each.ipus for each in store.attachments()] == [held.ipus]
        store.detach(held)
        assert store.attachments() == ()

    def test_a_full_pod_says_who_has_it(self, opened):
        open_as = opened(POD16)
        open_as("alice").create_partition(_ask("big", 16))
        with pytest.raises(
            NotEnoughIpusError, match=r"0 of 16 IPUs are free.*big of user alice has 16"
        ):
            open_as("bob").create_partition(_ask("mine", 1))

    def test_a_name_is_given_once(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask())
        with pytest.raises(NameTakenError, match="partition named p already exists"):
            store.create_partition(_ask())

    def test_unknown_names_are_said_with_those_that_are_there(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask("there"))
        calls = (
            lambda: store.partition("gone"),
            lambda: store.reset_partition("gone"),
            lambda: store.fail_partition("gone", "why"),
            lambda: store.remove_partition("gone"),
            lambda: store.attach("gone", 1, holder()),
        )
        for call in calls:
            with pytest.raises(UnknownNameError, match="'gone'; existing partitions: there"):
                call()
        for call in (store.remove_cluster, store.remove_allocation):
            with pytest.raises(UnknownNameError, match="'gone'"):
                call("gone")

    def test_only_the_owner_removes_unless_forced(self, opened):
        open_as = opened(POD16)
        open_as("alice").create_partition(_ask())
        with pytest.raises(NotAllowedError, match="belongs to user alice, not to bob"):
            open_as("bob").remove_partition("p")
        open_as("bob").remove_partition("p", force=True)
        assert open_as("alice").partitions() == ()

    def test_removed_ipus_are_free_again(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask("p", 16))
        store.remove_partition("p")
        assert store.create_partition(_ask("q", 16)).size == 16

    def test_reset_begins_a_generation_and_heals(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask())
        broken = store.fail_partition("p", "link down\nbetween ag01 and ag02")
        assert (broken.state, broken.operation) == (PartitionState.ERROR, OperationState.FAILED)
        assert broken.error == "link down between ag01 and ag02"
        with pytest.raises(InvalidRequestError, match=r"ERROR \(link down"):
            store.attach("p", 1, holder())
        healed = store.reset_partition("p")
        assert (healed.state, healed.generation, healed.error) == (PartitionState.ACTIVE, 1, "")

    def test_a_slow_pod_shows_what_is_being_done(self, opened):
        store = opened(replace(POD16, create_seconds=600, reset_seconds=600))("alice")
        made = store.create_partition(_ask())
        assert (made.state, made.operation) == (PartitionState.PENDING, OperationState.CREATING)
        with pytest.raises(InUseError, match="PENDING, operation CREATING"):
            store.attach("p", 1, holder())
        again = store.reset_partition("p")
        assert (again.state, again.operation) == (PartitionState.PENDING, OperationState.RESETTING)

    def test_attached_ipus_are_had_by_one(self, opened):
        open_as = opened(POD16)
        store, other = open_as("alice"), open_as("bob")
        store.create_partition(_ask("p", 4, reconfigurable=True))
        first = store.attach("p", 1, holder("first.py"))
        second = other.attach("p", 2, holder("second.py", "bob"))
        assert (first.ipus, second.ipus) == ((0,), (2, 3))
        assert first.id != second.id
        with pytest.raises(
            InUseError, match=r"first\.py .*alice.* holds 1 IPU, second\.py .*bob.* holds 2 IPUs"
        ):
            other.attach("p", 2, holder())
        held = other.attachments()
        assert held == (replace(first, id=""), replace(second, id=""))
        store.detach(first)
        store.detach(first)
        assert other.attach("p", 2, holder()).ipus == (0, 1)

    def test_a_program_may_be_called_anything(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask())
        # The name of a file on Linux, as Python reads it.
        store.attach("p", 1, holder("tr\udcffain\n\x1b[31m.py" + 300 * "y"))
        (held,) = store.attachments()
        assert held.holder.program == "tr?ain??[31m.py" + 240 * "y"
        with pytest.raises(InUseError) as caught:
            store.remove_partition("p")
        assert str(caught.value).isprintable()

    def test_named_ipus_are_those(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask("p", 8))
        assert store.attach("p", 3, holder(), ipus=[5, 1, 6]).ipus in ((5, 1, 6), (1, 5, 6))
        with pytest.raises(InUseError, match="IPUs 6, 7"):
            store.attach("p", 2, holder(), ipus=[6, 7])
        for ipus in ([8, 9], [1, 1], [2]):
            with pytest.raises(InvalidRequestError):
                store.attach("p", 2, holder(), ipus=ipus)

    def test_what_a_partition_never_had_is_no_matter_of_waiting(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask("p", 4))
        with pytest.raises(NotEnoughIpusError, match="has 4 IPUs, but 8 IPUs"):
            store.attach("p", 8, holder())
        with pytest.raises(InvalidRequestError, match="3, which is not a power of two"):
            store.attach("p", 3, holder())

    def test_what_is_held_is_left_alone(self, opened):
        store = opened(POD16)("alice")
        store.create_partition(_ask())
        held = store.attach("p", 4, holder())
        with pytest.raises(
            InUseError, match=r"^wait .* reset while .*; train\.py \(process 4321 of alice on h1\)"
        ):
            store.reset_partition("p")
        with pytest.raises(InUseError, match="cannot be removed"):
            store.remove_partition("p")
        store.remove_partition("p", force=True)
        assert store.attachments() == ()
        store.detach(held)

    def test_a_closed_store_gives_back(self, opened):
        open_as = opened(POD16)
        store, other = open_as("alice"), open_as("bob")
        store.create_partition(_ask())
        store.attach("p", 4, holder())
        store.close()
        store.close()
        assert other.attachments() == ()
        assert other.attach("p", 4, holder()).ipus == (0, 1, 2, 3)

    def test_clusters_and_allocations_come_and_go(self, opened):
        store = opened(POD16)("alice")
        with pytest.raises(InUseError, match="allocations a16"):
            store.remove_cluster("c16")
        store.create_partition(_ask())
        with pytest.raises(InUseError, match="partitions p"):
            store.remove_allocation("a16")
        store.remove_partition("p")
        store.remove_allocation("a16")
        store.remove_cluster("c16")
        assert (store.pod().clusters, store.pod().allocations, store.pod().ipus()) == ((), (), ())
        with pytest.raises(UnknownNameError, match="no allocation"):
            store.create_partition(_ask())
        names = tuple(agent.name for agent in POD16.agents)
        cluster = Cluster(name="c", agents=names, num_ilds=2, topology="torus", is_looped=True)
        store.create_cluster(cluster)
        store.create_allocation(Allocation(name="left", cluster="c", agents=names[:2]))
        store.create_allocation(Allocation(name="right", cluster="c", agents=names[2:]))
        assert store.pod().clusters == (cluster,)
        # No partition spans two allocations, however much is free.
        with pytest.raises(NotEnoughIpusError):
            store.create_partition(_ask(size=16))
        made = store.create_partition(_ask(size=8, allocation="right"))
        assert {ipu.agent for ipu in made.ipus} == set(names[2:])

    @pytest.mark.parametrize(
        "cluster",
        [
            Cluster(name="c16", agents=("ag01",)),
            Cluster(name="c", agents=("ag01",)),
            Cluster(name="c", agents=("nobody",)),
            Cluster(name="c", agents=()),
        ],
    )
    def test_clusters_that_cannot_be_are_refused(self, opened, cluster):
        store = opened(POD16)("alice")
        with pytest.raises(PodError) as caught:
            store.create_cluster(cluster)
        assert "\n" not in str(caught.value)
        assert store.pod() == POD16
