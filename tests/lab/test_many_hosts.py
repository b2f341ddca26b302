"""Jobs over several hosts: who runs where, the same numbers, what is copied, what is printed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.processes import wait_until
from support.repository import ROOT
from support.terminals import LAUNCHER, Typist
from system import parity_program

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
VENV = Path(sys.prefix)


def lines(text):
    """Return the untagged lines of stdout in the order of instances."""
    return [line.partition(">:")[2] for line in sorted(text.splitlines())]


def test_every_instance_runs_on_its_host(lab, hello):
    done = lab[0].poprun(
        "--host", "node[0-1]", "--num-instances", "4", "--num-replicas", "8", hello
    )
    assert done.returncode == 0, done.stderr
    where = ["node0", "node0", "node1", "node1"]
    assert lines(done.stdout) == [f"{i} {host} {' '.join(where)}" for i, host in enumerate(where)]


def test_the_order_of_hosts_and_the_name_of_their_network_are_the_users(lab, hello):
    done = lab[0].poprun("-v", "--host", "node1,node0", "--num-instances", "4",
                         "--num-replicas", "4", "--host-subnet", "eth0", hello)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("btl_tcp_if_include eth0 ", "prte_if_include eth0 ", "over the network eth0"):
        assert words in done.stderr
    places = [line.split()[1] for line in lines(done.stdout)]
    assert places == ["node1", "node1", "node0", "node0"]


def test_a_host_file_whose_hosts_are_all_others(make_lab, hello, tmp_path):
    lab = make_lab(4)
    (tmp_path / "hosts").write_text("# the cluster\nnode[1-3] slots=1\n")
    done = lab[0].poprun("--host-file", tmp_path / "hosts", "--num-instances", "3",
                         "--num-replicas", "3", hello)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in lines(done.stdout)] == ["node1", "node2", "node3"]


def test_a_job_on_one_other_host(lab, hello):
    done = lab[0].poprun("--host", "node1", "--num-instances", "2", "--num-replicas", "2", hello)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in lines(done.stdout)] == ["node1", "node1"]


SEEN = """
import importlib.util, os, socket
import torch, torch.distributed as dist
import popdist

environ = {name: os.environ.get(name) for name in NAMES}
sdk_names = ("poptorch", "horovod", "popart")
found = all(importlib.util.find_spec(name) is not None for name in sdk_names)
dist.init_process_group("gloo")
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
dist.destroy_process_group()
control = os.environ["POPRUN_CONTROL"].startswith("tcp:10.99.0.1:")
places = socket.gethostname(), popdist.getInstanceIndex(), os.environ["NODE_RANK"]
print(*places, found, control, total.tolist(), environ)
"""
# By variable, the launcher's value and the one that instances on other hosts get.
VARIABLES = {
    "POPDIST_DETERMINISTIC": ("1", "1"),
    "POPTORCH_LOG_LEVEL": ("ERR", "OFF"),  # overridden by --env
    "POPLAR_X": ("a b", "a b"),
    "GROUP_WORLD_SIZE": (None, "2"),
    "OTHER": ("here", None),
    "POPRUN_TOKEN": (None, None),
    "MASTER_ADDR": (None, "10.99.0.1"),
}


def test_instances_on_every_host_get_their_variables_network_and_libraries(lab, script):
    program = script(f"NAMES = {list(VARIABLES)}\n{SEEN}")
    network = "10.99.0.0/24"
    words = ["-v", "--host", "node[0-1]", "--env", "POPTORCH_LOG_LEVEL=OFF"]
    settings = {name: before for name, (before, _) in VARIABLES.items() if before}
    done = lab[0].poprun(
        *words,
        program,
        env={**settings, "POPRUN_NUM_INSTANCES": "2"},
    )
    assert done.returncode == 0, done.stderr
    environ = {name: after if name != "OTHER" else "here" for name, (_, after) in VARIABLES.items()}
    assert lines(done.stdout) == [
        f"node{index} {index} {index} True True [3.0, 3.0, 3.0] "
        f"{environ if index == 0 else {**environ, 'OTHER': None}}"
        for index in (0, 1)
    ]
    assert f"btl_tcp_if_include {network} " in done.stderr
    assert f"prte_if_include {network} " in done.stderr
    assert f"communicate over the network {network}" in done.stderr


def test_a_program_does_without_names_of_the_sdk(lab, script):
    words = ("--host", "node1", "-n", "1", "--sdk-names", "no")
    done = lab[0].poprun(*words, script("import popdist\n"))
    assert done.returncode == 1
    assert "No module named 'popdist'" in done.stderr


@pytest.fixture
def confused_mpirun(tmp_path):
    """An mpirun that takes node0 for node1 and node1 for node0."""
    path = tmp_path / "bin" / "mpirun"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "other = {'node0:1': 'node1:1', 'node1:1': 'node0:1'}\n"
        "other['node0:1,node1:1'] = 'node1:1,node0:1'\n"
        f"other[{str(tmp_path)!r}] = {str(VENV)!r}\n"
        f"mpirun = {str(VENV / 'bin' / 'mpirun')!r}\n"
        "os.execv(mpirun, [mpirun, *(other.get(word, word) for word in sys.argv[1:])])\n"
    )
    path.chmod(0o755)
    return path


def test_instances_on_other_hosts_than_planned_do_not_start(lab, hello, tmp_path, confused_mpirun):
    base = ("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2",
            "--mpi", confused_mpirun)  # fmt: skip
    plan = tmp_path / "plan.json"
    for words in ((*base, "--export-plan", plan, "--run", hello), ("--from-plan", plan)):
        done = lab[0].poprun(*words)
        assert done.returncode == 3, done.stdout + done.stderr
        assert done.stderr.startswith(
            "poprun-py: error: instance 0 runs on host node1, but the plan places it on host node0"
        )
        assert done.stdout == ""
    for host in lab.hosts:
        wait_until(
            lambda host=host: not host.processes("instance/start_wrapper.py"),
            20,
            f"{host.name} keeps it",
        )


def test_placement_is_planned_for_each_hosts_own_machine(lab, tmp_path, hello):
    plan = tmp_path / "plan.json"
    base = ["--host", lab.names(), "--num-instances", "4", "--num-replicas", "4"]
    hardware = lab[0].poprun(*base, "--print-hardware=json")
    assert hardware.returncode == 0, hardware.stderr
    assert set(json.loads(hardware.stdout)["hosts"]) == {"node0", "node1"}
    # Nothing is asked again for a look: the answer is remembered.
    lab[1].link("down")
    try:
        done = lab[0].poprun(*base, "--export-plan", plan)
    finally:
        lab[1].link("up")
    assert done.returncode == 0, done.stderr
    cpus = [instance["cpus"] for instance in json.loads(plan.read_text())["instances"]]
    assert all(cpus)
    assert cpus[:2] == cpus[2:]


def test_a_subnet_that_a_host_is_not_on(lab, hello):
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2",
                         "--host-subnet", "10.77.0.0/16", hello)  # fmt: skip
    assert done.returncode == 3
    assert (
        "node0 has no network 10.77.0.0/16, which --host-subnet names; the networks of the "
        "host are: eth0 (10.99.0.0/24)"
    ) in done.stderr


def test_ssh_arguments_and_configuration_reach_every_ssh(make_lab, hello, tmp_path):
    lab = make_lab(2)
    for host in lab.hosts:
        (host.ssh / "id_ed25519").rename(host.ssh / "other_key")
    base = ["--host", lab.names(), "--num-instances", "2", "--num-replicas", "2"]
    done = lab[0].poprun(*base, "--ssh-args", "-i /root/.ssh/other_key", hello)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "ssh_config"
    config.write_text("Host node*\n  IdentityFile /root/.ssh/other_key\n")
    done = lab[0].poprun(*base, "--ssh-config", config, hello)
    assert done.returncode == 0, done.stderr


def test_training_on_two_hosts_equals_one_process(lab, tmp_path):
    import torch

    program = Path(parity_program.__file__)
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "4", "--num-replicas", "8",
                         program, tmp_path, timeout=140)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for dtype, tolerance in {"float64": 1e-12, "float32": 1e-5}.items():
        expected = parity_program.reference(getattr(torch, dtype))
        found = [np.load(tmp_path / f"weights-{dtype}-{i}.npz") for i in range(4)]
        for name, weights in expected.items():
            error = np.linalg.norm(found[0][name] - weights) / np.linalg.norm(weights)
            assert error <= tolerance, (dtype, name)
            assert all(np.array_equal(found[0][name], other[name]) for other in found[1:])


def test_sync_brings_only_what_changed_and_nothing_else(make_lab, tmp_path):
    lab = make_lab(2)
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import helper; print(helper.WORD)\n")
    (project / "helper.py").write_text("WORD = 'first'\n")
    (project / "outside").symlink_to("/etc/passwd")
    # node1 has a disk of its own there.
    assert lab[1].run("mount", "-t", "tmpfs", "tmpfs", tmp_path).returncode == 0
    base = ["--host", lab.names(), "--num-instances", "2", "--num-replicas", "2"]
    without = lab[0].poprun(*base, project / "train.py", cwd=None)
    assert without.returncode == 3
    assert "node1" in without.stderr
    assert "--sync" in without.stderr
    run = [*base, "--sync", project, project / "train.py"]
    done = lab[0].poprun(*run)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == ["first"] * 2
    lab[1].run("sh", "-c", f"touch {project}/mine; ls -i {project}/train.py > /dev/null")
    before = lab[1].run("stat", "-c", "%i %Z", project / "train.py").stdout
    (project / "helper.py").write_text("WORD = 'second'\n")
    done = lab[0].poprun(*run)
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == ["second"] * 2
    assert lab[1].run("stat", "-c", "%i %Z", project / "train.py").stdout == before
    there = set(lab[1].run("ls", project).stdout.split())
    assert there - {"__pycache__"} == {"train.py", "helper.py", "mine"}
    assert not (project / "mine").exists()


def small_environment(folder):
    """Copy of the environment that runs now what launcher, MPI and mpi4py need."""
    packages = {"mpi4py", "click", "psutil", "rich", "pygments", "markdown_it", "mdurl"}

    def others(path, names):
        if Path(path).name == "site-packages":
            return [n for n in names if n.partition("-")[0] not in packages]
        return ["__pycache__"]

    shutil.copytree(sys.prefix, folder, symlinks=True, ignore=others)
    return folder


def test_a_host_without_the_environment_gets_it_once(make_lab, script, tmp_path):
    lab = make_lab(2)
    environment = small_environment(tmp_path / "environment")
    # node1 has a disk of its own there.
    assert lab[1].run("mount", "-t", "tmpfs", "tmpfs", environment).returncode == 0
    program = script(
        "import socket, sys\n"
        "from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, socket.gethostname(), sys.prefix, MPI.__file__)\n"
    )
    words = (environment / "bin" / "python", "-m", "poprun_py", "--host", lab.names(),
             "--num-instances", "2", "--num-replicas", "2")  # fmt: skip
    without = lab[0].run(*words, program)
    assert without.returncode == 3
    assert "host node1: " in without.stderr
    assert "--synchronise-python-venv yes" in without.stderr

    def run_with():
        done = lab[0].run(*words, "--synchronise-python-venv", "yes", program)
        assert done.returncode == 0, done.stderr
        for index, line in enumerate(lines(done.stdout)):
            size, host, prefix, library = line.split()
            assert (size, host, prefix) == ("2", f"node{index}", str(environment))
            assert library.startswith(f"{environment}/lib/")
        # Inode and time of the last change: what was copied again would have another.
        listing = ("find", environment, "!", "-type", "d", "-not", "-path", "*/__pycache__/*",
                   "-printf", "%i %C@ %P -> %l\\n")  # fmt: skip
        return sorted(lab[1].run(*listing).stdout.splitlines())

    first = run_with()
    assert any(" bin/python3 -> /" in line for line in first)
    assert run_with() == first


def test_check_shows_every_host_and_starts_nothing(lab, hello):
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2",
                         "--check", hello)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert "node[0-1]" in first or ("node0" in first and "node1" in first)
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for row in (
        *("reached", "Python", "MPI", "poprun-py", "mpi4py", "torch", "program", "folder"),
        *("network", "clock", "free memory", "/dev/shm", "open files", "calls back"),
    ):
        assert row in rows
    assert "over 10.99.0.0/24" in done.stdout
    assert "<stdout>" not in done.stdout


def test_the_keyboard_reaches_another_host(lab, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import socket, popdist_py\n"
        "popdist_py.init()\n"
        "me = popdist_py.getInstanceIndex()\n"
        "popdist_py.breakpoint(1)\n"
        "if me == 0: print('hello', input('name? '))\n"
        "popdist_py.barrier()\n"
    )
    words = ("--host", "node0,node1", "--num-instances", "2", "--num-replicas", "2",
             "--hang-timeout", "5", "--env", f"PYTHONPATH={ROOT}", program)  # fmt: skip
    # A terminal for this host only: its programs see the processes of no other.
    with Typist(lab[0].enter(*LAUNCHER, *words)) as user:
        user.expect(r"instance 1 is in the debugger")
        user.expect(r"\[1,1\]<stdout>:\(Pdb\) ")
        user.type("p socket.gethostname()\r")
        user.expect(r"'node1'\r\n.*\(Pdb\) ")
        user.type("c\r")
        user.expect(r"name\? ")
        user.type("Anna\r")
        user.expect("hello Anna")
        assert user.ended() == 0
        assert user.modes() == user.first_modes
