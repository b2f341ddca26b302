"""Commands that run programs on another host, by ssh or Slurm's srun, and explanations of errors.

The commands are started by probe.py, folder_sync.py and mpirun.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from poprun_py.errors import UsageError
from poprun_py.machines import mpirun_ssh
from poprun_py.machines.host_list import Host, parse_host_list
from poprun_py.options.launch_config import LaunchConfig

CONNECT_SECONDS = 5
# ssh must not prompt, because the user cannot answer during a launch, and ssh would prompt once for
# every host.
_SSH_OPTIONS = ("-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A short description of a problem, and of the way to solve it."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Shell:
    """A way to run commands on other hosts.

    ``words`` is the ssh command with its arguments, or empty if Slurm's srun is used instead of
    ssh.
    """

    words: tuple[str, ...]

    def command(self, host: str, words: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs ``words`` on ``host``."""
        if not self.words:
            return ("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}",
                    "--immediate=10", *words)  # fmt: skip
        # The command runs in sh -c, because the user's login shell on the host may not understand
        # the syntax of sh.
        return (*self.words, host, f"sh -c {mpirun_ssh.quoted(shlex.join(words))}")

    @property
    def agent(self) -> tuple[str, ...]:
        """The command that mpirun runs in place of ssh, to wrap remote commands in ``sh -c``.

        mpirun splits this command at blanks and colons. If a path in the command contains blanks or
        colons, the command is ssh itself.
        """
        words = (sys.executable, "-I", "-S", mpirun_ssh.__file__, *self.words, mpirun_ssh.MARK)
        is_usable = self.words and not any(c.isspace() or c == ":" for c in "".join(words[:4]))
        return words if is_usable else self.words


def shell_of(config: LaunchConfig, hosts: Sequence[Host], environ: Mapping[str, str]) -> Shell:
    """Return the shell for ``hosts``: Slurm's srun inside a Slurm allocation, or else ssh.

    Inside an allocation, ssh is used in three cases: if arguments for ssh are given, if there is a
    single host, or if the hosts are not the first hosts of the allocation in the same order. With a
    single host or another order, Open MPI 5 through Slurm would put the instances on other hosts.

    Raises:
        UsageError: The arguments for ssh cannot be passed through mpirun, or the hosts have
            different users.
    """
    login = _login(hosts)
    chosen = bool(login) or config.ssh_args is not None or config.ssh_config is not None
    if environ.get("SLURM_JOB_NODELIST") and not chosen and len(hosts) > 1:
        nodes = parse_host_list(environ["SLURM_JOB_NODELIST"], source="SLURM_JOB_NODELIST")
        if [host.name for host in hosts] == [node.name for node in nodes][: len(hosts)]:
            return Shell(())
    try:
        arguments = tuple(shlex.split(config.ssh_args or ""))
    except ValueError as error:
        raise UsageError(
            f"{config.named('ssh_args')} {config.ssh_args!r}: {str(error).lower()}; expected "
            "arguments quoted as in a shell"
        ) from None
    if config.ssh_config is not None:
        if not Path(config.ssh_config).is_file():
            raise UsageError(f"{config.shown('ssh_config')}: no such file")
        arguments = ("-F", str(Path(config.ssh_config).absolute()), *arguments)
    for word in arguments:
        if not word or any(c.isspace() for c in word):
            # mpirun splits the ssh command at blanks and does not support quotation marks.
            raise UsageError(
                f"ssh argument {word!r}: expected no blanks in it; put such a setting into the "
                "file given with --ssh-config"
            )
    return Shell(("ssh", *arguments, *login, *_SSH_OPTIONS))


def _login(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the ssh arguments for logging in as the user of ``hosts``; empty without a user.

    Raises:
        UsageError: The hosts have different users, but mpirun uses one user for all hosts.
    """
    others = [host for host in hosts if not host.is_local]
    user = others[0].user if others else ""
    for host in others:
        if host.user != user:
            raise UsageError(
                f"hosts {others[0].name} and {host.name} are given with different users "
                f"({user or 'none'} and {host.user or 'none'}): give one user for all hosts, or "
                "put each host's User into the file given with --ssh-config"
            )
    return ("-l", user) if user else ()


def scratch_file() -> IO[bytes]:
    """Return a file in memory for the output of ssh.

    The output of ssh does not go to a pipe, because the pipe might never be closed: ssh may leave a
    background process that shares the connection with later ssh commands and keeps the pipe open.
    """
    return os.fdopen(os.memfd_create("ssh"), "r+b", buffering=0)


def read_back(file: IO[bytes]) -> bytes:
    """Return the content of a file from ``scratch_file``."""
    file.seek(0)
    return file.read()


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is still running, and wait until it has ended."""
    if process.poll() is None:
        process.kill()
        process.wait()


# Patterns of error messages of ssh and srun, each with a description of the problem and a fix.
_MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*changed",
     "its host key differs from the known one",
     "if the host was reinstalled: ssh-keygen -R {host}"),
    (r"Host key verification failed|No .* host key is known",
     "its host key is not known",
     "connect once by hand and compare the fingerprint: ssh {host}"),
    (r"(?s)(Identity file .* not accessible|no such identity).*Permission denied",
     "a key file for it is missing on this machine", "check --ssh-args and --ssh-config"),
    (r"Permission denied|Too many authentication failures|no mutual signature",
     "ssh wants a password or another key",
     "install your key there: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
     "the name cannot be resolved",
     "check its spelling, DNS and /etc/hosts"),
    (r"Connection refused", "it answers, but no sshd listens",
     "start sshd there, or give its port: --ssh-args '-p PORT'"),
    (r"timed out|No route to host|Host is down|Network is unreachable|Connection closed|reset by",
     "it does not answer",
     "check that the host and the network are up: ping {host}"),
    (r"Bad configuration option|Bad port|Can't open user config|unknown option|usage: ssh",
     "ssh rejects its arguments", "check --ssh-args and --ssh-config"),
    (r"Unable to (contact|confirm|create|allocate)|Invalid node name|srun: error",
     "Slurm cannot start a step there", "check sinfo, or start by ssh: --host {host},..."),
)  # fmt: skip


def explain_ssh_error(host: str, stderr: str, command: str) -> Problem:
    """Return the problem that made ssh or srun fail.

    Args:
        host: The name of the host.
        stderr: The output of ssh or srun.
        command: The name of the command that failed, for the description of an unknown error.
    """
    for pattern, text, fix in _MEANINGS:
        if re.search(pattern, stderr, re.IGNORECASE):
            return Problem(text, fix.format(host=host))
    last = " ".join(stderr.split())[-200:] or "without any output"
    return Problem(f"{command} failed ({last})", f"try by hand: ssh {host} true")
