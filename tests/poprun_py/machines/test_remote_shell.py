"""Commands for other hosts, explanations of failed ssh commands, and copies of folders."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from poprun_py.errors import StartError, UsageError
from poprun_py.machines import mpirun_ssh
from poprun_py.machines.host_list import Host, parse_host_list
from poprun_py.machines.remote_shell import (
    Problem,
    Shell,
    explain_ssh_error,
    folder_to_sync,
    shell_of,
    sync_command,
    sync_folder,
)
from poprun_py.options.launch_config import LaunchConfig

HOSTS = parse_host_list("n[0-1]", source="test")
SLURM = {"SLURM_JOB_NODELIST": "n[0-3]"}


def test_ssh_does_not_prompt_and_has_a_time_out():
    words = shell_of(LaunchConfig(), HOSTS, {}).words
    assert words[0] == "ssh"
    assert "-oBatchMode=yes" in words
    assert any(word.startswith("-oConnectTimeout=") for word in words)


def test_arguments_of_the_user_come_first_and_take_precedence(tmp_path):
    config = tmp_path / "config"
    config.write_text("")
    words = shell_of(
        LaunchConfig(ssh_args="-p 2222 -i 'key'", ssh_config=str(config)), HOSTS, {}
    ).words
    assert words[:7] == ("ssh", "-F", str(config), "-p", "2222", "-i", "key")


def test_ssh_logs_in_as_the_user_of_the_hosts():
    words = shell_of(LaunchConfig(ssh_args="-v"), parse_host_list("me@n0,me@n1", source=""), SLURM)
    assert words.words[:4] == ("ssh", "-v", "-l", "me")
    with pytest.raises(UsageError, match="hosts n0 and n1 are given with different users"):
        shell_of(LaunchConfig(), parse_host_list("me@n0,n1", source=""), {})
    here = Host(name="here", user="else", is_local=True)
    assert "-l" not in shell_of(LaunchConfig(), (here, Host(name="n0")), {}).words


@pytest.mark.parametrize("text", ["-i 'my key'", "''", "-o 'ProxyCommand nc %h'"])
def test_arguments_that_mpirun_would_split_are_rejected(text):
    with pytest.raises(UsageError, match="--ssh-config"):
        shell_of(LaunchConfig(ssh_args=text), HOSTS, {})


def test_unclosed_quotations_and_missing_files_are_usage_errors():
    with pytest.raises(UsageError, match=r"^ssh_args "):
        shell_of(LaunchConfig(ssh_args="'x"), HOSTS, {})
    with pytest.raises(UsageError, match=r"^ssh_config=/nowhere/config"):
        shell_of(LaunchConfig(ssh_config="/nowhere/config"), HOSTS, {})


def test_srun_is_used_for_the_hosts_of_an_allocation():
    assert shell_of(LaunchConfig(), HOSTS, SLURM) == Shell(())
    assert shell_of(LaunchConfig(), (Host(name="other"),), SLURM).words
    assert shell_of(LaunchConfig(), HOSTS[:1], SLURM).words
    assert shell_of(LaunchConfig(ssh_args="-v"), HOSTS, SLURM).words
    command = Shell(()).command("n1", ("python", "-"))
    assert command[0] == "srun"
    assert "--nodelist=n1" in command
    assert command[-2:] == ("python", "-")


def test_the_remote_shell_does_not_change_the_words():
    shell, option, line = shlex.split(Shell(("ssh",)).command("h", ("a b", "$x"))[-1])
    assert (shell, option, shlex.split(line)) == ("sh", "-c", ["a b", "$x"])


def test_the_remote_command_of_mpirun_does_not_need_a_bourne_shell_as_login_shell(tmp_path):
    log_in = tmp_path / "ssh"  # runs its last word as sshd does
    program = Path(__file__).with_name("strict_shell.py")
    strict = shlex.join([sys.executable, "-I", "-S", str(program)])
    log_in.write_text(f'#!/bin/sh\necho "$1 $2 $3"\nexec {strict} -c "$4"\n')
    log_in.chmod(0o755)
    words = Shell((str(log_in), "-v")).agent
    written = ("host", "A=it\\'s ; export A;", "sh -c 'echo \"$A\" `echo b`'")
    done = subprocess.run([*words, *written], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("-v -x host\nit's b\n", "")


def test_arguments_of_mpirun_around_its_command_are_kept():
    assert mpirun_ssh.ssh_command(["ssh", "-v", "--", "-l", "me", "host", "a", "b"]) == [
        "ssh", "-v", "-x", "-l", "me", "host", "sh -c 'a b'",
    ]  # fmt: skip
    of_c_shell = ["host", "set path = ( /mpi/bin $path )"]
    assert mpirun_ssh.ssh_command(["ssh", "--", *of_c_shell]) == ["ssh", "-x", *of_c_shell]


def test_mpirun_runs_ssh_itself_if_it_would_split_the_path_of_the_wrapper(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my python/bin/python")
    assert Shell(("ssh", "-v")).agent == ("ssh", "-v")
    assert Shell(()).agent == ()


@pytest.mark.parametrize(
    ("said", "meaning", "fix"),
    [
        ("Host key verification failed.", "not known", "ssh n1"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         "the host key of the host differs from the known host key", "ssh-keygen -R n1"),
        ("root@n1 (Permission denied) (publickey,password).", "password", "ssh-copy-id n1"),
        ("Warning: Identity file /x not accessible: No such file or directory.\n"
         "n1: Permission denied (publickey).", "key file", "--ssh-args"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "resolved", "DNS"),
        ("ssh: connect to host n1 port 22: Connection refused", "no sshd", "-p PORT"),
        ("ssh: connect to host n1 port 22: No route to host", "does not answer", "ping n1"),
        ("ssh: connect to host n1 port 22: Connection timed out", "does not answer", "ping n1"),
        ("command-line: line 0: Bad configuration option: foo", "arguments", "--ssh-args"),
        ("srun: error: Unable to create step for job 3", "Slurm", "sinfo"),
        ("something new", "something new", "ssh n1"),
        ("", "without output", "ssh n1"),
    ],
)  # fmt: skip
def test_errors_of_ssh_are_explained(said, meaning, fix):
    problem = explain_ssh_error("n1", said, "ssh")
    assert meaning in problem.text
    assert fix in problem.fix
    assert "\n" not in str(problem)


# --- copying ----------------------------------------------------------------------------------


def test_a_copy_deletes_nothing_and_follows_no_links_to_other_folders(tmp_path):
    command = sync_command(tmp_path, "n1", Shell(("ssh", "-p", "2222")))
    assert command[0] == "rsync"
    assert "--safe-links" in command
    assert not any(word.startswith("--delete") for word in command)
    assert command[-3:] == ("--", f"{tmp_path}/", f"n1:{tmp_path}/")
    assert "ssh -p 2222" in command
    # The Python of a virtual environment is a link to a place outside it.
    assert "--safe-links" not in sync_command(tmp_path, "n1", Shell(()), links_out=True)


def test_links_in_the_path_of_a_folder_are_kept(tmp_path, monkeypatch):
    (tmp_path / "disk" / "project").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    assert folder_to_sync(str(tmp_path / "home" / "project")) == tmp_path / "home" / "project"
    above = tmp_path / "home" / "project" / ".." / ".."
    assert folder_to_sync(str(above)) == tmp_path
    (tmp_path / "usr").symlink_to("/usr")
    with pytest.raises(UsageError, match="is a folder of the system"):
        folder_to_sync(str(tmp_path / "usr"))


@pytest.mark.parametrize("folder", ["/", "/usr", "/etc", "~", "/no/such/folder"])
def test_folders_of_the_machine_are_rejected(folder):
    from pathlib import Path

    with pytest.raises(UsageError, match="--sync"):
        folder_to_sync(str(Path(folder).expanduser()))


def test_a_failed_copy_names_the_host(tmp_path, monkeypatch):
    fake = tmp_path / "bin" / "rsync"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'n1: Permission denied (publickey).' >&2\nexit 255\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/bin:/usr/bin")
    with pytest.raises(StartError) as caught:
        sync_folder(tmp_path, (Host(name="n1"),), Shell(("ssh",)))
    assert str(caught.value).startswith("host n1: ssh asks for a password or another key")


def test_a_problem_reads_as_one_sentence():
    assert str(Problem("it is broken", "mend it")) == "it is broken; mend it"
