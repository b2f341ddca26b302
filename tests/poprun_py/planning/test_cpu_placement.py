"""Placements for every stored machine and mode (golden files), and rules for random machines."""

import contextlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.launcher.machines import machines
from support.launcher.plans import placing
from support.launcher.sysfs_trees import TREES, snapshot

from poprun_py.display.formatting import ranges_text
from poprun_py.errors import UsageError
from poprun_py.machines.host_list import LOCALHOST
from poprun_py.machines.machine import Core, Machine, NumaNode
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.cpu_placement import MODES, place, place_instances
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.plan_warnings import placement_warnings

GOLDEN = Path(__file__).parent / "golden" / "placement"


def flat(nodes: int, cores: int, smt: int = 1, memory: int = 1 << 30) -> Machine:
    """A regular machine of one package."""
    total = nodes * cores
    return Machine(
        cores=tuple(
            Core(tuple(i + t * total for t in range(smt)), 0, i // cores, i // cores, 0)
            for i in range(total)
        ),
        numa_nodes=tuple(
            NumaNode(
                n,
                tuple(n * cores + i + t * total for t in range(smt) for i in range(cores)),
                memory,
                tuple(10 if n == m else 20 for m in range(nodes)),
            )
            for n in range(nodes)
        ),
        allowed_cpus=frozenset(range(total * smt)),
        allowed_memory_nodes=frozenset(range(nodes)),
    )


def within(count: int, most: int) -> int:
    """Return a number from 2 to ``most`` that follows from ``count``."""
    assume(most >= 2)
    return 2 + count % (most - 1)


def cpus_of(placements) -> list[str]:
    return [ranges_text(placement.cpus) for placement in placements]


# --- goldens ------------------------------------------------------------------------------------


def described(machine: Machine, num_instances: int, config: LaunchConfig) -> str:
    """Return placements (``NODES:CPUS/MEMORY NODES*THREADS``) and warnings as a line."""
    try:
        placements = place(machine, num_instances, config)
    except UsageError as error:
        return f"error: {error}"
    parts = [
        f"{ranges_text(p.numa_nodes)}:{ranges_text(p.cpus) or 'any'}"
        f"/{ranges_text(p.memory_nodes) or 'any'}*{p.threads}"
        for p in placements
    ]
    warnings = [f"! {text}" for text in placement_warnings(machine, placements)]
    return "  ".join([*parts, *warnings])


def plans(machine: Machine) -> str:
    """Return the placements on a machine for its golden file."""
    nodes = len({core.numa_node for core in machine.usable_cores})
    cores = len(machine.usable_cores)
    cpus = sum(len(core.cpus) for core in machine.usable_cores)
    asked = [
        (count, mode, {})
        for mode in MODES
        for count in sorted({2, 3, 4, nodes, nodes + 1, min(cores, 8) + 1} - {1})
    ]
    asked += [
        (2, "spreadnuma", {"cores_per_instance": 1}),
        (2, "packnuma", {"cores_per_instance": 2}),
        (2, "spreadnuma", {"smt": True}),
        (2, "spreadnuma", {"reserve_cores": 1}),
        (2, "spreadnuma", {"cores_per_instance": 2, "reserve_cores": 1, "smt": True}),
        (1, "spreadnuma", {}),
    ]
    if cpus < 12:
        asked += [(cpus + 1, "spreadnuma", {}), (cpus + 1, "spreadnuma", {"oversubscribe": True})]
    lines = []
    for count, mode, values in asked:
        words = " ".join([mode, *(f"{name}={value}" for name, value in values.items())])
        lines.append(f"{count} {words}: {described(machine, count, placing(mode, **values))}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", TREES)
def test_placements(name, golden):
    golden(f"placement/{name}.txt", plans(snapshot(name)))


def test_every_golden_file_has_a_machine():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(TREES)


# --- rules --------------------------------------------------------------------------------------


@st.composite
def questions(draw) -> tuple[Machine, int, LaunchConfig]:
    machine = draw(machines())
    config = placing(
        draw(st.sampled_from(MODES)),
        cores_per_instance=draw(st.none() | st.integers(1, 4)),
        reserve_cores=draw(st.integers(0, 2)),
        smt=draw(st.booleans()),
        oversubscribe=draw(st.booleans()),
    )
    return machine, draw(st.integers(1, 24)), config


@given(questions())
def test_instances_that_do_not_fit_are_placed_with_the_reason_in_the_plan(question):
    machine, count, config = question
    config = replace(config, num_instances=count, num_replicas=count)
    topology = make_topology(config, (LOCALHOST,))
    placements, refusal = place_instances(config, topology, (machine,))
    assert tuple(placements) == place(machine, count, replace(config, oversubscribe=True))
    with pytest.raises(UsageError) if refusal else contextlib.nullcontext() as caught:
        place(machine, count, config)
    assert caught is None or str(caught.value) == refusal


@given(questions())
def test_instances_are_placed_on_allowed_cpus_or_refused(question):
    machine, count, config = question
    cpus = sum(len(core.cpus) for core in machine.usable_cores)
    try:
        placements = place(machine, count, config)
    except UsageError:
        assert not config.oversubscribe
        return
    assert len(placements) == count
    assert count <= cpus or config.oversubscribe
    memory = {n.index for n in machine.numa_nodes} & machine.allowed_memory_nodes
    for placement in placements:
        assert machine.allowed_cpus.issuperset(placement.cpus)
        assert memory.issuperset(placement.memory_nodes)
        assert placement.threads >= 1
        assert list(placement.cpus) == sorted(set(placement.cpus))
        owners = {n.index for n in machine.numa_nodes if set(n.cpus) & set(placement.cpus)}
        assert not placement.cpus or owners == set(placement.numa_nodes)
    threads = sum(placement.threads for placement in placements)
    # Round robin ignores the sizes of the nodes.
    if count <= cpus and not config.numa_aware:
        assert threads <= cpus
    if machine.quota_cpus is not None:
        assert threads <= max(count, machine.quota_cpus)
    fits = count <= len(machine.usable_cores) and not config.numa_aware
    if fits and not config.smt:
        assert threads <= len(machine.usable_cores)


@given(machines(), st.integers(2, 24), st.sampled_from(("spreadnuma", "spreadcores", "spreadl3")))
def test_spread_modes_give_every_cpu_to_exactly_one_instance(machine, count, mode):
    count = within(count, sum(len(core.cpus) for core in machine.usable_cores))
    if count > len(machine.usable_cores):
        count = 2
    placements = place(machine, count, placing(mode))
    given_out = sorted(cpu for placement in placements for cpu in placement.cpus)
    assert all(placement.cpus for placement in placements)
    assert len(set(given_out)) == len(given_out)
    nodes = {core.numa_node for core in machine.usable_cores}
    # More instances than groups may leave a tiny group without an instance: better than giving
    # one instance far fewer cores than the rest.
    if mode == "spreadcores" or (mode == "spreadnuma" and count <= len(nodes)):
        assert given_out == sorted(machine.allowed_cpus)


@given(machines(), st.integers(2, 12))
def test_spreadcores_sizes_and_classes_differ_by_at_most_one(machine, count):
    count = within(count, len(machine.usable_cores))
    placements = place(machine, count, placing("spreadcores"))
    cores = [
        [core for core in machine.usable_cores if set(core.cpus) <= set(p.cpus)] for p in placements
    ]
    for speed in (0, 1):
        sizes = [sum(core.efficiency == speed for core in own) for own in cores]
        assert max(sizes) - min(sizes) <= 1
    assert max(map(len, cores)) - min(map(len, cores)) <= 1


@given(machines(), st.integers(2, 5))
def test_spreadnuma_gives_whole_contiguous_nodes(machine, count):
    nodes = sorted({core.numa_node for core in machine.usable_cores})
    count = within(count, len(nodes))
    placements = place(machine, count, placing("spreadnuma"))
    assert [node for p in placements for node in p.numa_nodes] == nodes
    sizes = [len(p.numa_nodes) for p in placements]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("count", "nodes"),
    [(c, n) for c in (2, 3, 5, 6, 7, 12, 16) for n in (1, 2, 3, 4, 8) if c > n],
)
def test_more_instances_than_equal_nodes_follow_the_index_rule(nodes, count):
    placements = place(flat(nodes, 16), count, placing())
    assert [p.numa_nodes for p in placements] == [(i * nodes // count,) for i in range(count)]


@given(machines(), st.integers(2, 24))
def test_round_robin_is_instance_modulo_nodes(machine, count):
    nodes = sorted({core.numa_node for core in machine.usable_cores})
    placements = place(machine, count, placing("roundrobin", oversubscribe=True))
    for i, placement in enumerate(placements):
        assert placement.numa_nodes == (nodes[i % len(nodes)],)
        node = next(n for n in machine.numa_nodes if n.index == nodes[i % len(nodes)])
        assert set(placement.cpus) == machine.allowed_cpus.intersection(node.cpus)


@given(machines(), st.integers(2, 12))
def test_packnuma_gives_equal_shares_and_leaves_no_earlier_node_idle(machine, count):
    count = within(count, len(machine.usable_cores))
    placements = place(machine, count, placing("packnuma"))
    cores = [
        sum(set(core.cpus) <= set(p.cpus) for core in machine.usable_cores) for p in placements
    ]
    assert set(cores) == {len(machine.usable_cores) // count}
    assert [p.numa_nodes for p in placements] == sorted(p.numa_nodes for p in placements)
    used = [cpu for p in placements for cpu in p.cpus]
    assert len(set(used)) == len(used)


def test_packnuma_stays_within_nodes_where_it_fits():
    placements = place(flat(4, 4), 5, placing("packnuma", cores_per_instance=2))
    assert cpus_of(placements) == ["0-1", "2-3", "4-5", "6-7", "8-9"]
    across = place(flat(2, 3), 3, placing("packnuma"))
    assert cpus_of(across) == ["0-1", "2-3", "4-5"]


def test_spreadl3_keeps_a_cache_in_one_instance():
    machine = snapshot("epyc-nps4")
    for count in (2, 5, 16):
        placements = place(machine, count, placing("spreadl3"))
        groups = [
            {core.l3 for core in machine.cores if set(core.cpus) & set(p.cpus)} for p in placements
        ]
        assert all(not (a & b) for a, b in pairwise(groups))


def test_no_instance_gets_only_slow_cores():
    machine = snapshot("hybrid")
    for count in (2, 3, 8):
        for placement in place(machine, count, placing()):
            assert any(cpu < 16 for cpu in placement.cpus)


def test_siblings_stay_together_and_threads_count_cores_unless_asked():
    machine = flat(2, 4, smt=2)
    plain = place(machine, 4, placing())
    assert cpus_of(plain) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert [p.threads for p in plain] == [2, 2, 2, 2]
    assert [p.threads for p in place(machine, 4, placing(smt=True))] == [4, 4, 4, 4]


def test_more_instances_than_cores_get_a_hardware_thread_each():
    placements = place(flat(1, 4, smt=2), 8, placing())
    assert cpus_of(placements) == ["0", "4", "1", "5", "2", "6", "3", "7"]
    assert [p.threads for p in placements] == [1] * 8


def test_reserved_cores_stay_in_the_affinity_and_out_of_the_threads():
    placements = place(flat(2, 4), 2, placing(reserve_cores=1))
    assert cpus_of(placements) == ["0-3", "4-7"]
    assert [p.threads for p in placements] == [3, 3]


def test_quota_limits_threads_and_not_cpus():
    placements = place(snapshot("quota-container"), 4, placing())
    assert [p.threads for p in placements] == [2, 2, 1, 1]
    assert sum(len(p.cpus) for p in placements) == 64


@pytest.mark.parametrize("mode", MODES)
def test_one_instance_is_not_restricted(mode):
    (placement,) = place(flat(2, 4), 1, placing(mode))
    assert (placement.cpus, placement.memory_nodes, placement.threads) == ((), (), 8)


def test_disabled_binds_nothing_and_divides_the_threads():
    placements = place(flat(2, 4), 3, placing("disabled"))
    assert [(p.cpus, p.memory_nodes, p.numa_nodes) for p in placements] == [((), (), ())] * 3
    assert [p.threads for p in placements] == [3, 3, 2]


def test_memory_without_cpus_belongs_to_the_nearest_node():
    placements = place(snapshot("memory-only-node"), 2, placing())
    assert [p.memory_nodes for p in placements] == [(0,), (1, 2)]


def test_a_node_without_memory_uses_the_nearest_memory():
    placements = place(snapshot("node-without-memory"), 4, placing())
    assert [p.memory_nodes for p in placements] == [(0,), (0,), (2,), (2,)]


def test_no_memory_nodes_if_there_is_no_choice():
    assert [p.memory_nodes for p in place(flat(1, 4), 2, placing())] == [(), ()]
    assert {p.memory_nodes for p in place(snapshot("cpuset-container"), 2, placing())} == {()}


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "config", "message"),
    [
        (9, placing(), "9 instances are planned on .* 8 usable CPUs, .* at most 8 fit .*; "
                       ".*--oversubscribe"),
        (3, placing(cores_per_instance=3), "needs 9 cores, but the host has 8 cores; .* at most 2"),
        (5, placing(cores_per_instance=2), "needs 10 cores, but the host has 8 cores; .* at "
                                           "most 1"),
        (2, placing(reserve_cores=4), ("the instance with local rank 0 has 4 cores, of which "
                                       "at most 3 can be")),
        (8, placing(reserve_cores=1), ("the instance with local rank 0 has 1 core, of which at "
                                       "most 0 can be")),
    ],
)  # fmt: skip
def test_refusals_name_the_numbers(count, config, message):
    with pytest.raises(UsageError, match=message) as caught:
        place(flat(2, 4), count, config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_refusal_for_too_small_nodes_has_a_hint():
    machine = snapshot("asymmetric")
    with pytest.raises(UsageError, match=r"local rank 1 only 4 cores.*at most 4.*packnuma"):
        place(machine, 2, placing(cores_per_instance=6))
    packed = place(machine, 2, placing("packnuma", cores_per_instance=6))
    assert [len(p.cpus) for p in packed] == [6, 6]


# --- warnings -----------------------------------------------------------------------------------


def test_warnings_for_more_threads_than_cpus():
    machine = flat(1, 2)
    placements = place(machine, 4, placing(oversubscribe=True))
    assert placement_warnings(machine, placements) == (
        "4 instances share 2 CPUs, so at most 2 instances run at the same time",
    )
    alone = flat(1, 1)
    assert placement_warnings(alone, place(alone, 2, placing(oversubscribe=True))) == (
        "2 instances share 1 CPU, so at most 1 instance runs at the same time",
    )
    fitting = place(machine, 2, placing())
    assert placement_warnings(machine, fitting) == ()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert placement_warnings(machine, fitting, user_threads={variable: 2}) == (
            f"the instances have 4 compute threads on 2 CPUs; set {variable} to at most 1",
        )


def test_warnings_for_a_quota_and_for_uneven_shares():
    quota = snapshot("quota-container-v1")
    (warning,) = placement_warnings(quota, place(quota, 2, placing()))
    assert "2 compute threads, but the CPU quota is 0.5 CPUs" in warning
    uneven = snapshot("asymmetric")
    (warning,) = placement_warnings(uneven, place(uneven, 2, placing()))
    assert "from 4 to 12 compute threads" in warning
