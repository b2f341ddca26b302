"""The back end popdist between real hosts: by poprun-py and without it, and lost hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lab.lab import Lab

from popdist_py.peers.silence import SILENT_SECONDS

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("process_group_program.py")


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


def test_a_model_is_the_same_on_two_hosts_as_in_one_process(lab):
    done = lab[0].poprun(
        *("--host", lab.names(), "--num-instances", "4", "--num-replicas", "4"),
        *("--oversubscribe", PROGRAM, 300_000),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = ends(done.stdout)
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"], done.stdout
    # MPI was neither imported nor started.
    assert all("[(0, 1), (2, 3)] False" in line for line in lines), lines
    (total,) = {line.split()[-1] for line in lines}
    assert float.fromhex(total) == pytest.approx(trained_in_one_process(4), rel=1e-5)


def trained_in_one_process(num_ranks):
    """Train the program's model on the batches of all ranks; return the sum of its weights."""
    import torch

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            torch.manual_seed(100 * step + rank)
            (model(torch.randn(8, 300)).square().mean() / num_ranks).backward()
        optimizer.step()
    return sum(parameter.double().sum() for parameter in model.parameters()).item()


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
    """Lose node2 while three ranks run; return the output and errors of the other two ranks."""
    processes = start_alone(lab, (0, 1, 2), how)
    for process in processes:
        assert say in process.stdout.readline()
    lab[2].link("down")
    ended = []
    for process in processes[:2]:
        ended.append(process.communicate(timeout=90))
        assert process.returncode, ended
    lab[2].run("pkill", "-KILL", "-f", PROGRAM.name)
    processes[2].communicate(timeout=30)
    lab[2].link("up")
    return ended


def test_a_dead_host_that_others_wait_for_is_named_within_the_time_out(three_hosts):
    for _, error in lose_a_host(three_hosts, "late-2", "waits"):
        assert "RankLostError" in error
        assert "rank 2 " in error


def test_a_host_that_dies_during_a_call_is_noticed_within_the_time_out(three_hosts):
    """Its name is unknown where everything was received from it, but not sent to it."""
    for _, error in lose_a_host(three_hosts, "endless", "goes on"):
        assert "RankLostError" in error


def test_a_receive_notices_a_dead_host_as_soon_as_a_collective_does(three_hosts):
    for output, error in lose_a_host(three_hosts, "messages", "exchanged"):
        assert "RankLostError" in error
        assert f"no answer from rank 2 on another host for {SILENT_SECONDS} s" in error
        assert float(output.split()[-1]) < SILENT_SECONDS + 10, output
