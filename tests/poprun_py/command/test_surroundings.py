"""The command in odd surroundings: files, names, locales and variables as they occur."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.launcher.consoles import KeptConsole
from support.repository import ROOT

from poprun_py import LaunchConfig, StartError, UsageError, launch, plan
from poprun_py.command import click_commands
from poprun_py.command.cli import run
from poprun_py.command.pods.graphcore_tools import GC_INFO
from poprun_py.command.pods.pod_command import COMMAND as POD_COMMAND
from poprun_py.errors import UnwritableError
from poprun_py.launching import launch as launching
from poprun_py.machines.probe_script import networks
from poprun_py.planning.hosts_and_mpi import hosts_of
from poprun_py.planning.installed_mpi import MPICH, OPEN_MPI_4, OPEN_MPI_5, Mpi
from poprun_py.running.supervise.launch_result import LaunchResult

JOB = ("--num-instances", "2", "--num-replicas", "4")
# What a job around this one leaves in the environment.
OUTER = {
    "POPRUN_CPUS": "4000",
    "POPRUN_MEMORY_NODES": "9",
    "POPDIST_NETWORK": "10.9.0.0/16",
    "POPDIST_RESTART_COUNT": "3",
    "POPDIST_NODE_DEVICE_ID": "126",
    "POPDIST_REPLICA_INDEX_OFFSET": "60",
    "RANK": "15",
    "OMPI_COMM_WORLD_SIZE": "16",
}


def refusal(capsys, *words):
    """Return exit code and the one line of a refused command."""
    code = run([str(word) for word in words])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return code, err


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("plain.sh", ("'plain.sh' was not found on PATH; write a program in this folder as "
                      "./NAME")),
        ("./plain.sh", "'./plain.sh' is not executable: type chmod +x ./plain.sh once, or launch "
         "/bin/sh ./plain.sh"),
        ("sh plain.sh -x", ("'sh plain.sh -x' was not found; give the command without quotes "
                            "around all of its words: poprun-py [options] sh plain.sh -x")),
        ("./plain.sh --lr 1", "give the command without quotes around all of its words"),
        ("python3 there.py", "give the command without quotes around all of its words"),
        ("LR=1 sh plain.sh", "give the command without quotes around all of its words"),
        ("no such command", "'no such command' was not found on PATH"),
        ("LR=0.1", ("'LR=0.1' was not found; to set a variable, write it before poprun-py, or "
                    "use --env LR=0.1")),
        ("./windows.sh", (r"interpreter '/bin/sh\r' does not exist; the file has Windows line "
                          r"ends")),
        ("./folder", "'./folder' is a folder"),
        ("folder.py", "folder.py is a folder"),
        ("gone.py", "gone.py does not exist in "),
        ("x" * 300 + ".py", "File name too long"),
        ("./" + "x" * 300, "File name too long"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_run_is_named_with_the_reason(
    program, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    (tmp_path / "windows.sh").write_bytes(b"#!/bin/sh\r\necho hi\r\n")
    (tmp_path / "windows.sh").chmod(0o755)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    code, line = refusal(capsys, program)
    assert code == 3
    assert said in line


@pytest.mark.parametrize("words", [["gone.py"], ["true"], ["--check"]])
def test_a_deleted_folder_is_no_trouble_with_standard_output(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    code, line = refusal(capsys, *words)
    assert (code, "the working folder was deleted" in line) == (3, True)


def test_files_with_a_byte_order_mark_are_read(capsys, tmp_path):
    for name, text in (("c.toml", "num-replicas = 2"), ("c.json", '{"num-replicas": 2}')):
        (tmp_path / name).write_text("\ufeff" + text)
        assert run(["--import-config", str(tmp_path / name), "--print-topology", "json"]) == 0
        assert '"num_replicas": 2' in capsys.readouterr().out


def test_a_host_file_of_the_environment_is_not_called_an_option(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", "/no/such/file")
    _, line = refusal(capsys, "--dry-run", "x")
    assert "error: host file /no/such/file: No such file" in line


@pytest.mark.parametrize("text", ["[1]", "x", "[" * 100_000])
def test_target_options_that_are_none(capsys, monkeypatch, text):
    monkeypatch.setenv("POPLAR_TARGET_OPTIONS", text)
    code, line = refusal(capsys, "--dry-run", "x")
    assert (code, "expected a JSON object" in line, len(line) < 200) == (2, True, True)


def test_this_machine_needs_no_ssh_by_its_own_address():
    own = networks()
    assert own
    for _, address, *_ in own:
        hosts = hosts_of(LaunchConfig(host=f"{address},elsewhere"), {})
        assert [host.is_local for host in hosts] == [True, False]


@pytest.mark.parametrize("kind", [OPEN_MPI_5, OPEN_MPI_4, MPICH])
def test_a_job_of_this_machine_does_not_follow_an_allocation_around_it(kind):
    around = {
        "SLURM_JOBID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "PRTE_MCA_prte_default_hostfile": "f",
    }

    def command(host, environ):
        config = LaunchConfig(host=host, program=("x",))
        mpi = Mpi(path="/mpi/bin/mpirun", kind=kind)
        return " ".join(plan(config, environ={"PATH": "/bin", **environ}, mpi=mpi).command)

    told = {
        OPEN_MPI_5: "--prtemca plm ssh --prtemca ras ^slurm --prtemca prte_default_hostfile none",
        OPEN_MPI_4: "--mca plm rsh --mca ras ^slurm --mca orte_default_hostfile none",
    }.get(kind, "")
    assert told in command("localhost", around)
    assert not told or told not in command("localhost", {})


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        pytest.param({"PYTHONIOENCODING": "utf-8"}, marks=pytest.mark.sweep),
    ],
)
def test_everything_can_be_printed_in_every_locale(locale, tmp_path):
    words = ["--print-topology", "tree", "--dry-run", b"\xff\xc3\xbc"]
    done = subprocess.run(
        [sys.executable, "-m", "poprun_py", *words],
        capture_output=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **locale},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"replica 0" in done.stdout
    lines = b"`- " if "ascii" in locale.values() else "└─ ".encode()
    assert lines + b"instance 0" in done.stdout
    assert rb"\u25" not in done.stdout


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LaunchConfig(program="abc"), "program is 'abc': expected a list"),
        (lambda: LaunchConfig(program=None), "program is None: expected a list"),
        (lambda: plan("train.py"), "expected a LaunchConfig"),
        (lambda: launch({}), "expected a function, a program as a list of words"),
    ],
)
def test_what_is_no_configuration_is_refused_from_python(call, said):
    with pytest.raises(UsageError, match=said):
        call()


def test_paths_and_lists_may_be_given_from_python():
    config = LaunchConfig(program=[Path("a/b.py"), "x"], output_dir=Path("out"))
    assert config == LaunchConfig(program=("a/b.py", "x"), output_dir="out")


def test_other_threads_cannot_run_a_plan_in_this_process():
    planned = plan(LaunchConfig(program=("true",)))
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(launching.launch, launching.Request(planned), KeptConsole())
        with pytest.raises(StartError, match="a plan can only be launched in the main"):
            future.result(60)


def given_input(kind, folder, stack):
    """Return a file, a pipe or a socket that holds the lines a and b, or nothing to read."""
    if kind == "nothing":
        return subprocess.DEVNULL
    if kind == "file":
        file = stack.enter_context((folder / "words").open("w+"))
        file.write("a\nb\n")
        file.seek(0)
        return file
    if kind == "pipe":
        read, write = os.pipe()
        stack.callback(os.close, read)
        os.write(write, b"a\nb\n")
        os.close(write)
        return read
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    with ours:
        ours.sendall(b"a\nb\n")
    return theirs


@pytest.mark.mpi
@pytest.mark.parametrize(
    "kind",
    ["pipe", *(pytest.param(k, marks=pytest.mark.sweep) for k in ("file", "nothing", "socket"))],
)
def test_instance_0_reads_standard_input_to_its_end(poprun, tmp_path, kind):
    with contextlib.ExitStack() as stack:
        stdin = given_input(kind, tmp_path, stack)
        done = poprun(*JOB, "sh", "-c", "echo $RANK $(cat) $POPRUN_STDIN", stdin=stdin)
    words = "" if kind == "nothing" else " a b"
    assert sorted(done.stdout.splitlines()) == [f"[1,0]<stdout>:0{words}", "[1,1]<stdout>:1"]


@pytest.mark.mpi
def test_instance_0_shares_the_position_in_a_file(poprun, tmp_path):
    (tmp_path / "lines").write_text("a\nb\nc\n")
    once = shlex.join(
        [sys.executable, "-m", "poprun_py", "-n", "1", "--output", "plain", "sh", "-c"]
    )
    # A shell that reads a file leaves its position behind the line: `while read` goes on there.
    loop = f'while read x; do {once} "echo $x; read y; echo +\\$y"; done < lines'
    done = subprocess.run(
        ["sh", "-c", loop], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "a\n+b\nc\n+\n", done.stderr


@pytest.mark.mpi
@pytest.mark.sweep
def test_a_job_that_starts_again_reads_the_same_file_again(poprun, tmp_path):
    with (tmp_path / "words").open("w+") as file:
        file.write("gone\nleft\n")
        file.seek(5)
        job = ("-n", 1, "--max-restarts", 1, "sh", "-c", "cat; exit 1")
        lines = poprun(*job, stdin=file).stdout.splitlines()
    assert lines == ["[1,0]<stdout>:left"] * 2


@pytest.mark.mpi
def test_an_instance_of_another_job_without_a_home_starts_its_own_job(poprun):
    names = " ".join(f"${name}" for name in OUTER)
    inner = [
        sys.executable,
        "-m",
        "poprun_py",
        *JOB,
        "--offline-mode",
        "yes",
        "--process-placement",
    ]
    done = poprun(
        "env", "-u", "HOME", *inner, "disabled", "sh", "-c", f"echo {names} $HOME", env=OUTER
    )
    assert done.returncode == 0, done.stderr
    home = os.path.expanduser("~")  # noqa: PTH111
    told = sorted(line.split(":", 2)[2] for line in done.stdout.splitlines())
    assert told == [f"0 0 2 {home}", f"2 1 2 {home}"]


def test_interrupted_before_anything_is_there_it_ends_without_a_traceback():
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'poprun_py.options.declared_options':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['poprun-py', '--num-replicas', '1', 'true']\n"
        "from poprun_py.__main__ import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_job_that_the_user_ended_has_no_report(monkeypatch, capsys):
    monkeypatch.setattr(
        "poprun_py.launching.launch.launch", lambda *_, **__: LaunchResult(exit_code=130)
    )
    assert run(["--num-instances", "1", "--num-replicas", "1", "true"]) == 130
    assert capsys.readouterr().err == ""


_COMMANDS = (
    ("-m poprun_py --nothing", 2),
    ("-m poprun_py.command.pods.pod_command --version", 0),
    (
        "-c 'from poprun_py.command.pods.graphcore_tools import gc_info as main; main()' --version",
        0,
    ),
    ("-m popdist_py --nothing", 2),
    ("-m popdist_py.timeline --help", 0),
)


def test_every_command_has_its_code_though_all_standard_descriptors_are_closed():
    started = [
        subprocess.Popen(
            ["sh", "-c", f"{sys.executable} {command} >&- 2>&- <&-"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for command, _ in _COMMANDS
    ]
    codes = [process.wait(100) for process in started]
    assert codes == [code for _, code in _COMMANDS]


@pytest.mark.parametrize("command", [GC_INFO, POD_COMMAND])
def test_a_help_that_cannot_be_written_has_the_code_of_an_unwritable_stdout(command, monkeypatch):
    def refuse(text):
        raise UnwritableError(BrokenPipeError(32, "Broken pipe"))

    monkeypatch.setattr(click_commands, "print_out", refuse)
    with pytest.raises(UnwritableError):
        command.main(["--help"], standalone_mode=False)
