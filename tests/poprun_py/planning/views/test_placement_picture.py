"""Pictures of where instances are placed."""

from support.launcher.sysfs_trees import snapshot

from poprun_py.planning.cpu_placement import PlacementPolicy, place
from poprun_py.planning.views.placement_picture import placement_line, placement_picture


def test_a_line_names_cpus_memory_and_threads():
    machine = snapshot("example")
    assert [placement_line(each) for each in place(machine, 3, PlacementPolicy())] == [
        "CPUs 0-15,32-47; memory of nodes 0-1; 16 threads",
        "CPUs 16-23,48-55; memory of node 2; 8 threads",
        "CPUs 24-31,56-63; memory of node 3; 8 threads",
    ]
    one = place(snapshot("quota-container-v1"), 2, PlacementPolicy())[0]
    assert placement_line(one) == "CPU 1; any memory; 1 thread"


def test_picture_shows_owners_idle_forbidden_and_slow_cores():
    machine = snapshot("cpuset-container")
    picture = placement_picture(machine, place(machine, 2, PlacementPolicy(cores_per_instance=2)))
    assert picture.splitlines() == [
        "node 0   | 0 0 . . . . . . x x x x x x x x |",
        "node 1   | 1 1 x x x x x x x x x x x x x x |",
        "(. no instance, x not allowed)",
        "instance 0: CPUs 0-1,32-33; any memory; 2 threads",
        "instance 1: CPUs 16-17; any memory; 2 threads",
    ]
    hybrid = snapshot("hybrid")
    rows = placement_picture(hybrid, place(hybrid, 2, PlacementPolicy())).splitlines()
    assert rows[0].split() == ["node", "0", "|", *"00001111", *["0'"] * 8, *["1'"] * 8, "|"]


def test_picture_of_memory_without_cpus_and_of_shared_cores():
    machine = snapshot("memory-only-node")
    rows = placement_picture(machine, place(machine, 3, PlacementPolicy("disabled"))).splitlines()
    assert rows[:3] == ["node 0   | * * * * |", "node 1   | * * * * |", "node 2   | memory only |"]
    assert "instance 2: any CPU; any memory; 2 threads" in rows
