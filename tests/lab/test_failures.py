"""What goes wrong between hosts: one line that names the host, the right exit code, and in time."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab.wire import IN, OUT, Faults, missing
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.collectives.between_hosts.tcp import SILENT_SECONDS

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(180)]
VENV = Path(sys.prefix)
JOB = ["--num-instances", "2", "--num-replicas", "2"]


def no_key(lab):
    (lab[0].ssh / "id_ed25519").unlink()


def unknown_host_key(lab):
    (lab[0].ssh / "known_hosts").write_text("")


def changed_host_key(lab):
    known = (lab[0].ssh / "known_hosts").read_text().splitlines()
    (lab[0].ssh / "known_hosts").write_text(
        f"{known[1].split()[0]} {' '.join(known[0].split()[1:])}\n"
    )


def no_python(lab):
    assert lab[1].run("mount", "-t", "tmpfs", "tmpfs", VENV).returncode == 0


def no_mpi(lab):
    for program in ("mpirun", "prted"):
        assert lab[1].run("mount", "--bind", "/dev/null", VENV / "bin" / program).returncode == 0


def other_python(lab):
    """Make one that says to be older: where it is asked, it reads a program from its input."""
    folder = lab[1].folder / "bin"
    shutil.copytree(VENV / "bin", folder, symlinks=True)
    (folder / "python").unlink()
    code = "import sys; sys.version_info = (3, 8, 0); exec(sys.stdin.read())"
    (folder / "python").write_text(
        f"#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -c '{code}'\n"
    )
    (folder / "python").chmod(0o755)
    assert lab[1].run("mount", "--bind", folder, VENV / "bin").returncode == 0


def host_down(lab):
    lab[1].kill()


def no_sshd_port(lab):
    (lab[0].ssh / "config").write_text("Host node1\n  Port 2222\n")


@pytest.mark.parametrize("check", [[], ["--no-check"]], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    ("breakage", "said", "fix"),
    [
        (no_key, "ssh wants a password", "ssh-copy-id node1"),
        (unknown_host_key, "host key is not known", "ssh node1"),
        (changed_host_key, "not the one that was known", "ssh-keygen -R node1"),
        (no_python, "python does not run there", "same path"),
        (no_mpi, "MPI is missing there", "mpirun"),
        (host_down, "does not answer", "ping node1"),
        (no_sshd_port, "no sshd listens", "-p PORT"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "",
)
def test_a_host_that_cannot_take_part(make_lab, hello, breakage, said, fix, check):
    lab = make_lab(2)
    # Once in good order, so that --no-check has what it needs to know.
    assert lab[0].poprun("--host", lab.names(), *JOB, "true").returncode == 0
    breakage(lab)
    begun = time.monotonic()
    done = lab[0].poprun("--host", lab.names(), *JOB, *check, hello)
    # 15 s on a machine that does nothing else.
    assert time.monotonic() - begun < 25
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("poprun-py: error: host node1: ")
    assert said in done.stderr
    assert fix in done.stderr


def test_a_login_shell_of_another_kind_than_bournes(make_lab, hello, tmp_path):
    lab = make_lab(2)
    shell, passwd = tmp_path / "strict", tmp_path / "passwd"
    program = ROOT / "tests" / "support" / "strict_shell.py"
    shell.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -S {program} "$@"\n')
    shell.chmod(0o755)
    passwd.write_text(f"root:x:0:0:root:/root:{shell}\nsshd:x:100:65534::/run/sshd:/bin/false\n")
    assert lab[1].run("mount", "--bind", passwd, "/etc/passwd").returncode == 0
    done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[1,{index}]<stdout>:{index} node{index} node0 node1" for index in range(2)
    ]


def test_a_name_that_nobody_knows(lab, hello):
    done = lab[0].poprun("--host", "node0,nowhere", *JOB, hello)
    assert done.returncode == 3
    assert "host nowhere: the name cannot be resolved" in done.stderr


def test_another_python_on_one_host(make_lab, hello):
    lab = make_lab(2)
    other_python(lab)
    done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    assert done.returncode == 3
    assert "host node1: Python is 3.8.0" in done.stderr
    table = lab[0].poprun("--host", lab.names(), *JOB, "--check", hello)
    assert table.returncode == 3
    python = next(line for line in table.stdout.splitlines() if line.startswith("Python"))
    assert python.count("!") == 1


def test_check_gives_one_fix_for_every_red_cell(make_lab, hello, tmp_path):
    lab = make_lab(3)
    lab[1].run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    lab[1].run("mount", "-t", "tmpfs", "tmpfs", tmp_path)
    lab[2].kill()
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "3", "--num-replicas", "3",
                         "--check", hello)  # fmt: skip
    assert done.returncode == 3
    table, fixes = done.stdout.split("\n\n")[:2]
    assert table.count("!") == len(fixes.splitlines()) == 3
    assert "node1: /dev/shm has 1 MiB free; enlarge it" in fixes
    assert "node1" in fixes
    assert "--sync" in fixes
    assert "node2: it does not answer" in fixes


@pytest.mark.parametrize("loss", [lambda lab: lab[1].link("down"), lambda lab: lab[1].kill()],
                         ids=["link", "power"])  # fmt: skip
def test_a_host_lost_while_mpirun_starts_is_named(make_lab, hello, tmp_path, loss):
    lab = make_lab(2)
    # mpirun's daemon on node1 says that it was started, and gets no further.
    daemon = tmp_path / "prted"
    daemon.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec sleep 600\n")
    daemon.chmod(0o755)
    assert lab[1].run("mount", "--bind", daemon, VENV / "bin" / "prted").returncode == 0
    process = lab[0].start(sys.executable, "-m", "poprun_py", "--host", lab.names(), *JOB, hello)
    wait_until((tmp_path / "started").exists, 30, "mpirun started no daemon")
    loss(lab)
    begun = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, (stdout, stderr)
    assert stderr.startswith("poprun-py: error: host node1: it does not answer"), stderr
    # 15 s until the launcher wonders, and what ssh takes to give up.
    assert time.monotonic() - begun < 15 + 20
    assert stdout == ""
    for text in ("mpirun", "poprun_py"):
        wait_until(lambda text=text: not lab[0].processes(text), 20, f"node0 keeps {text}")


def test_a_firewall_between_a_host_and_the_launcher_is_named(make_lab, hello):
    if missing():
        pytest.skip(missing())
    lab = make_lab(2)
    lab[0].wire(Faults(firewall=(IN,)))
    begun = time.monotonic()
    done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    # 10 s until the launcher wonders, 3 s for the host to try, and the end of mpirun.
    assert time.monotonic() - begun < 10 + 3 + 17
    assert done.returncode == 3
    assert "host node1: it cannot open a connection to this machine; open the fire" in done.stderr


def test_a_host_with_too_few_descriptors_is_named(make_lab, hello):
    lab = make_lab(2)
    limited = ("prlimit", f"--pid={lab[1].init_pid}", "--nofile=64:4096")
    subprocess.run(limited, check=True)
    done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    assert done.returncode == 3
    assert re.search(r"error: \d of 2 instances started, .* Host node1: at most 64 ", done.stderr)


WAITS = "import time, sys\nprint('here', flush=True)\ntime.sleep(120)\n"


def start_waiting(lab, script, *options):
    program = script(WAITS)
    process = lab[0].start(
        *(sys.executable, "-m", "poprun_py", "--host", lab.names(), *JOB, "--grace", "2", *options),
        str(program),
    )
    for _ in range(2):
        assert "here" in process.stdout.readline()
    return process, program


def test_a_link_that_goes_down_ends_the_job(make_lab, script):
    lab = make_lab(2)
    process, program = start_waiting(lab, script)
    lab[1].link("down")
    begun = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15 + 20
    assert process.returncode not in (0, 124)
    assert "instance 1 (replica 1) on node1 failed first" in stderr.splitlines()[0]
    # The host that was cut off ends its part by itself.
    wait_until(lambda: not lab[1].processes(program.name), 30, "node1 keeps its instance")
    wait_until(lambda: not lab[0].processes(program.name), 20, "node0 keeps its instance")


def test_a_host_that_dies_ends_the_job(make_lab, script):
    lab = make_lab(2)
    process, program = start_waiting(lab, script)
    lab[1].kill()
    begun = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15 + 20
    assert process.returncode not in (0, 124)
    assert "instance 1 (replica 1) on node1 failed first" in stderr.splitlines()[0]
    wait_until(lambda: not lab[0].processes(program.name), 20, "node0 keeps its instance")


def test_two_hosts_that_lose_one_another_are_named(make_lab, script):
    if missing():
        pytest.skip(missing())
    lab = make_lab(3)
    program = script(
        "import numpy as np\n"
        "import popdist_py\n"
        "popdist_py.init()\n"
        "popdist_py.all_reduce(np.ones(4))\n"
        "print('here', flush=True)\n"
        "while True: popdist_py.all_reduce(np.ones(4))\n"
    )
    process = lab[0].start(
        *(sys.executable, "-m", "poprun_py", "--host", lab.names(), "--num-instances", "3"),
        *("--num-replicas", "3", "--grace", "2", program),
    )
    for _ in range(3):
        assert "here" in process.stdout.readline()
    # The launcher reaches both, so that neither host is lost to it.
    lab[1].wire(Faults(dropped=(OUT,), peers=(lab[2].address,)))
    begun = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < SILENT_SECONDS + 20
    assert process.returncode == 1, stderr
    assert re.search(r"instance [12] \(replica [12]\) on node[12] failed first", stderr), stderr
    assert re.search(r"all_reduce.*: no answer from instance [12] on another host", stderr), stderr
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 20, f"{host.name} keeps it")


def test_a_restart_leaves_out_a_host_that_is_down(make_lab, script):
    lab = make_lab(3)
    program = script(
        "import os, socket, time\n"
        "import popdist_py\n"
        "from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.size, socket.gethostname(), flush=True)\n"
        "if os.environ['POPDIST_RESTART_COUNT'] == '0': time.sleep(120)\n"
    )
    process = lab[0].start(
        *(sys.executable, "-m", "poprun_py", "--host", lab.names(), "--num-instances", "6"),
        *("--num-replicas", "6", "--grace", "2", "--output", "plain", "--oversubscribe"),
        *("--max-restarts", "1", "--allow-fewer-hosts", program),
    )
    before = sorted(process.stdout.readline() for _ in range(6))
    assert before == [f"6 node{index}\n" for index in (0, 0, 1, 1, 2, 2)]
    lab[1].kill()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == ["6 node0"] * 3 + ["6 node2"] * 3
    said = stderr[stderr.index("poprun-py: warning: going on") :].splitlines()
    assert said[0] == "poprun-py: warning: going on without node1"
    assert said[1].startswith("poprun-py: warning: restart 1 of 1 in 1 s")


def test_an_instance_that_fails_on_another_host(lab, script):
    program = script(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n"
    )
    done = lab[0].poprun("--host", lab.names(), *JOB, program, timeout=60)
    assert done.returncode == 7
    assert "instance 1" in done.stderr
    assert "node1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_on_every_host(lab, script, number):
    process, program = start_waiting(lab, script)
    launcher = lab[0].run("pgrep", "-f", "m poprun_py --host").stdout.split()
    lab[0].run("kill", f"-{int(number)}", *launcher)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 20, f"{host.name} keeps it")


def test_a_launcher_that_is_killed_leaves_nothing_anywhere(lab, script):
    process, program = start_waiting(lab, script)
    launcher = lab[0].run("pgrep", "-f", "m poprun_py --host").stdout.split()
    lab[0].run("kill", "-9", *launcher)
    process.communicate(timeout=60)
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes(program.name), 20, f"{host.name} keeps it")
        wait_until(lambda host=host: not host.processes("prted"), 20, f"{host.name} keeps prted")


def test_a_daemon_that_is_killed_leaves_nothing_anywhere(lab, script):
    process, program = start_waiting(lab, script)
    assert lab[1].run("pkill", "-KILL", "-x", "prted").returncode == 0
    begun = time.monotonic()
    for host in lab.hosts:
        left = max(0.1, begun + 10 - time.monotonic())
        wait_until(
            lambda host=host: not host.processes(program.name), left, f"{host.name} keeps it"
        )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode not in (0, 124)
    assert stderr
