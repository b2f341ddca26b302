"""Commands on remote hosts through ssh or srun, copies of folders by rsync, and error texts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from poprun_py.errors import StartError, UsageError
from poprun_py.machines import mpirun_ssh
from poprun_py.machines.host_list import Host, parse_host_list
from poprun_py.options.launch_config import LaunchConfig

CONNECT_SECONDS = 5
# ssh must not prompt, because the user cannot answer during a launch, and ssh would prompt once for
# every host.
_SSH_OPTIONS = ("-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A short text about a problem of a host, and a short text about the fix."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Shell:
    """The ssh command, or Slurm's srun, for running commands on remote hosts.

    ``words`` is the ssh command with its arguments; empty if srun is used instead of ssh.
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

        mpirun splits the command at blanks and colons. If a path in the command contains blanks or
        colons, mpirun runs ssh instead.
        """
        words = (sys.executable, "-I", "-S", mpirun_ssh.__file__, *self.words, mpirun_ssh.MARK)
        is_usable = self.words and not any(c.isspace() or c == ":" for c in "".join(words[:4]))
        return words if is_usable else self.words


def shell_of(config: LaunchConfig, hosts: Sequence[Host], environ: Mapping[str, str]) -> Shell:
    """Return a shell that runs commands by srun inside a Slurm allocation, or else by ssh.

    Inside a Slurm allocation, ssh is used in three cases: if a user name or arguments for ssh are
    given, if there is a single host, or if the hosts are not the first hosts of the allocation in
    the same order. With a single host or another order, Open MPI 5 would use srun to start the
    instances on wrong hosts.

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
            raise UsageError(f"{config.shown('ssh_config')}: the file does not exist")
        arguments = ("-F", str(Path(config.ssh_config).absolute()), *arguments)
    for word in arguments:
        if not word or any(c.isspace() for c in word):
            # mpirun splits the ssh command at blanks and does not support quotation marks.
            raise UsageError(
                f"ssh argument {word!r}: expected an argument without blanks; put a setting with "
                "blanks into the file given with --ssh-config"
            )
    return Shell(("ssh", *arguments, *login, *_SSH_OPTIONS))


def _login(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the ssh arguments for logging in to ``hosts``, which must have one user name."""
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


# --- processes for other hosts ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The process of a command for a host, with its start time and the files for its output."""

    host: str
    began: float
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def ends_before(self, deadline: float) -> bool:
        """Wait for the end of the process; return False if the time ``deadline`` passes first."""
        try:
            self.process.wait(timeout=max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill the process if it is still running, and wait until it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def output(self) -> str:
        """Return the text that the process has written to standard output."""
        return _text(self.out)

    def errors(self) -> str:
        """Return the text that the process has written to standard error."""
        return _text(self.err)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def started(
    commands: Mapping[str, Sequence[str]], text: bytes = b"", *, fix: str = "install the command"
) -> Iterator[list[HostProcess]]:
    """Start a command for each host with ``text`` as input; kill running commands at the end.

    Raises:
        StartError: A command cannot be run; ``fix`` is the advice in the error message.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for host, words in commands.items():
            # The output goes to files in memory instead of pipes. A background process of ssh,
            # which keeps the connection for later ssh commands, could keep a pipe open forever.
            out, err = (
                stack.enter_context(os.fdopen(os.memfd_create("ssh"), "r+b", buffering=0))
                for _ in range(2)
            )
            try:
                process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=err)
            except OSError as error:
                raise StartError(
                    f"cannot run {words[0]} to reach other hosts: {error.strerror}; {fix}"
                ) from None
            running.append(HostProcess(host, time.time(), process, out, err))
            stack.callback(running[-1].end)
            assert process.stdin is not None
            # ``text`` fits into the pipe's buffer in the kernel, so writing never waits for a host.
            # Python's buffer is bypassed, because a flush fails if the process has already ended.
            with contextlib.suppress(BrokenPipeError):
                os.write(process.stdin.fileno(), text)
            process.stdin.close()
            process.stdin = None
        yield running


# Patterns in error messages of ssh and srun, each with a description of the problem and a fix.
_MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*changed",
     "the host key of the host differs from the known host key",
     "if the host was reinstalled, run ssh-keygen -R {host}"),
    (r"Host key verification failed|No .* host key is known",
     "the host key of the host is not known",
     "connect once by hand with ssh {host}, and compare the fingerprint"),
    (r"(?s)(Identity file .* not accessible|no such identity).*Permission denied",
     "the key file for the host is missing on this machine", "check --ssh-args and --ssh-config"),
    (r"Permission denied|Too many authentication failures|no mutual signature",
     "ssh asks for a password or another key",
     "install your key on the host with ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
     "the host name cannot be resolved",
     "check the spelling of the name, DNS and /etc/hosts"),
    (r"Connection refused", "the host answers, but no sshd listens",
     "start sshd on the host, or give the port of sshd with --ssh-args '-p PORT'"),
    (r"timed out|No route to host|Host is down|Network is unreachable|Connection closed|reset by",
     "the host does not answer",
     "check with ping {host} that the host and the network are up"),
    (r"Bad configuration option|Bad port|Can't open user config|unknown option|usage: ssh",
     "ssh rejects its arguments", "check --ssh-args and --ssh-config"),
    (r"Unable to (contact|confirm|create|allocate)|Invalid node name|srun: error",
     "Slurm cannot start a job step on the host",
     "check the output of sinfo, or use ssh with --host {host},..."),
)  # fmt: skip


def explain_ssh_error(host: str, stderr: str, command: str) -> Problem:
    """Return the problem that an error message of ssh or srun describes.

    Args:
        host: The name of the host.
        stderr: The error message of ssh or srun.
        command: The name of the command that failed, for the description of an unknown error.
    """
    for pattern, text, fix in _MEANINGS:
        if re.search(pattern, stderr, re.IGNORECASE):
            return Problem(text, fix.format(host=host))
    last = " ".join(stderr.split())[-200:] or "without output"
    return Problem(f"{command} failed ({last})", f"check by hand with ssh {host} true")


# --- copies of folders --------------------------------------------------------------------------

# rsync copies folders to the same path on other hosts, and sends only changed files. A copy never
# deletes files on the other hosts, and does not follow symbolic links. Symbolic links to places
# outside the folder are copied only if the folder is a Python environment, because ``bin/python``
# of an environment may be a link to another Python.
_EXCLUDED = (".git", "__pycache__")
_MAX_COPIES_AT_ONCE = 16
# rsync's time-out for a connection without traffic, in seconds. A whole copy has no time-out.
_STALL_SECONDS = 15


def folder_to_sync(path: str, option: str = "--sync") -> Path:
    """Return the absolute path of a folder that the user gave for ``option``.

    Symbolic links in the path are kept, because the user's programs may use the same path.

    Raises:
        UsageError: The folder is missing, or is a system or home folder such as ``/usr``.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: the folder does not exist")
    resolved = folder.resolve()
    if len(resolved.parts) < 3 or resolved == Path.home().resolve():
        raise UsageError(
            f"{option} {path}: {resolved} is a folder of the system or a home folder; expected the "
            "folder of a program"
        )
    return resolved if ".." in folder.parts else folder


def sync_command(
    folder: Path, host: str, shell: Shell, *, links_out: bool = False
) -> tuple[str, ...]:
    """Return the rsync command that copies ``folder`` to ``host``.

    ``links_out`` tells whether rsync copies symbolic links to places outside the folder.
    """
    remote = shlex.join(shell.words) if shell.words else "ssh"
    address = f"[{host}]" if ":" in host else host
    return (
        "rsync", "--archive", "--mkpath", f"--timeout={_STALL_SECONDS}",
        *(() if links_out else ("--safe-links",)),
        *(f"--exclude={name}" for name in _EXCLUDED), "--rsh", remote,
        "--", f"{folder}/", f"{address}:{folder}/",
    )  # fmt: skip


def sync_folder(
    folder: Path, hosts: Sequence[Host], shell: Shell, *, links_out: bool = False
) -> None:
    """Copy ``folder`` to all hosts except this machine; ``links_out`` is as in ``sync_command``.

    Raises:
        StartError: The command rsync is missing on this machine, or a copy failed.
    """
    others = [host.name for host in hosts if not host.is_local]
    for start in range(0, len(others), _MAX_COPIES_AT_ONCE):
        batch = others[start : start + _MAX_COPIES_AT_ONCE]
        commands = {name: sync_command(folder, name, shell, links_out=links_out) for name in batch}
        with started(commands, fix="install rsync on every host") as running:
            for each in running:
                if each.process.wait():
                    raise StartError(_sync_failure(each.host, folder, each.errors()))


def _sync_failure(host: str, folder: Path, stderr: str) -> str:
    if "rsync: command not found" in stderr or "rsync: not found" in stderr:
        return f"host {host}: rsync is not installed on the host; install rsync on every host"
    own = [line for line in stderr.splitlines() if not line.startswith("rsync error: unexplained")]
    return f"host {host}: {explain_ssh_error(host, chr(10).join(own), f'copying {folder}')}"


def environment_folder(option: str = "--synchronise-python-venv yes") -> Path:
    """Return the folder of the current virtual environment; error messages name ``option``.

    Raises:
        UsageError: This Python does not run in a virtual environment.
    """
    if sys.prefix == sys.base_prefix:
        raise UsageError(
            f"{option}: this Python does not run in a virtual environment; install the same Python "
            "and packages on every host"
        )
    return folder_to_sync(sys.prefix, option)
