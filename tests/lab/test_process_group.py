"""The back end popdist between real hosts: by poprun-py and without it, and lost hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lab.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("process_group_program.py")


def run(lab, hosts, *words, size=300_000):
    return lab[0].poprun(
        *("--host", hosts, "--num-instances", "4", "--num-replicas", "4", "--oversubscribe"),
        *(PROGRAM, size, *words),
    )


def start_alone(lab, hosts, *words, size=300_000, **environ):
    """Start one rank on each of these hosts as torchrun does, without the launcher."""
    return [
        host.start(
            *(sys.executable, PROGRAM, size, *words),
            env={"MASTER_ADDR": "node0", "MASTER_PORT": "29555", "RANK": str(rank)}
            | {"WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0"}
            | environ,
        )
        for rank, host in enumerate(lab[index] for index in hosts)
    ]


def ends(output):
    """Return what the ranks have printed at their end, in order."""
    lines = [line[line.index("rank ") :] for line in output.splitlines() if "rank " in line]
    return sorted(lines)


def test_a_model_is_the_same_on_two_hosts_as_on_one(lab):
    totals = []
    for hosts, expected in ((lab.names(), "[(0, 1), (2, 3)]"), ("node0", "[(0, 1, 2, 3)]")):
        done = run(lab, hosts)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = ends(done.stdout)
        assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"], done.stdout
        # MPI was neither imported nor started.
        assert all(f"{expected} False" in line for line in lines), lines
        (total,) = {line.split()[-1] for line in lines}
        totals.append(float.fromhex(total))
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


def test_hosts_find_one_another_without_the_launcher(lab):
    processes = start_alone(lab, (0, 1))
    results = [process.communicate(timeout=120) for process in processes]
    assert not any(process.returncode for process in processes), results
    lines = [line for output, _ in results for line in ends(output)]
    assert len(lines) == 2
    assert all("[(0,), (1,)] False" in line for line in lines), lines


def test_a_network_that_is_not_there_is_named(lab):
    processes = start_alone(lab, (0, 1), GLOO_SOCKET_IFNAME="eth7")
    for process, errors in [(each, each.communicate(timeout=120)[1]) for each in processes]:
        assert process.returncode
        assert "do not reach one another by TCP on eth7" in errors, errors


@pytest.fixture(scope="module")
def three_hosts(lab_permitted, tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab"), 3) as hosts:
        yield hosts


def lose_a_host(lab, how, say):
    """Lose node2 while three ranks run; return what the other two say, once they have failed."""
    processes = start_alone(lab, (0, 1, 2), how)
    for process in processes:
        assert say in process.stdout.readline()
    lab[2].link("down")
    errors = []
    for process in processes[:2]:
        errors.append(process.communicate(timeout=90)[1])
        assert process.returncode, errors
    lab[2].run("pkill", "-KILL", "-f", PROGRAM.name)
    processes[2].communicate(timeout=30)
    lab[2].link("up")
    return errors


def test_a_dead_host_that_others_wait_for_is_named_within_the_time_out(three_hosts):
    for error in lose_a_host(three_hosts, "late-2", "waits"):
        assert "RankLostError" in error
        assert "rank 2 " in error


def test_a_host_that_dies_during_a_call_is_noticed_within_the_time_out(three_hosts):
    """Its name is unknown where everything was received from it, but not sent to it."""
    for error in lose_a_host(three_hosts, "endless", "goes on"):
        assert "RankLostError" in error
