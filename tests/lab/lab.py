"""Separate hosts on this machine: every host is a set of namespaces with its own sshd.

A host has its own network (one veth on a bridge that lives in a network namespace too), host name,
processes, ``/dev/shm``, ``/tmp`` and ``~/.ssh``; the file system is shared otherwise. Nothing
touches this machine's own network: the namespaces exist as long as their first processes do, and
those die with the test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab.wire import TAP_DEVICE, Faults

ROOT = Path(__file__).resolve().parents[2]
# Every host has its own mounted over it; ssh finds no other, wherever HOME is.
_SSH_FOLDER = Path("/root/.ssh")
# By which the one that a lab has made is known from a user's own.
_MODE_OF_OURS = 0o711
SUBNET = "10.99.0"
IPV6_SUBNET = "fd00:99::/64"
PROGRAMS = ("unshare", "nsenter", "ip", "tc", "sshd", "ssh", "ssh-keygen")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PR_SET_PDEATHSIG = 1

_SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {ssh}/authorized_keys
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
MaxStartups 100
LogLevel ERROR
"""
_BECOME_HOST = """\
set -e
# The command hostname refuses underscores; the kernel does not.
echo {name} > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
# MPI's daemons write into /tmp under names made of process numbers, which hosts have in common.
mkdir -p {folder}/tmp
mount -t tmpfs tmpfs {folder}/tmp
for path in {visible}; do
    mkdir -p {folder}/tmp/${{path#/tmp/}}
    mount --bind $path {folder}/tmp/${{path#/tmp/}}
done
mount --rbind {folder}/tmp /tmp
mount --bind {shared}/hosts /etc/hosts
mkdir -p /run/sshd
mkdir -p -m 0711 /root/.ssh
mount --bind {ssh} /root/.ssh
# bash reads this file when sshd starts it, and the commands that the user has there can take long.
[ ! -f /root/.bashrc ] || mount --bind /dev/null /root/.bashrc
ip link set lo up
exec {sshd} -D -e -f {folder}/sshd_config
"""


def missing() -> str:
    """Say what keeps this machine from having a lab; empty if nothing does."""
    absent = [p for p in PROGRAMS if shutil.which(p, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install openssh-server iproute2)"
    if os.geteuid():
        return "network namespaces with sshd need root"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "ip",
            "link",
            "add",
            "name",
            "b0",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": _PATH},
        check=False,
    )
    return (
        f"network namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else ""
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(*words: object) -> None:
    finished = subprocess.run(
        [str(w) for w in words],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": _PATH},
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {finished.stderr or finished.stdout}")


@dataclass
class LabHost:
    """One host: its name, its address and the process that holds its namespaces."""

    name: str
    address: str
    folder: Path
    ssh: Path
    holder: subprocess.Popen
    port: str
    switch_pid: int
    is_alive: bool = True
    init_pid: int = field(default=0)
    _wire: subprocess.Popen | None = None
    # Commands that no test has waited for so far, such as those of a test that failed.
    _started: list[subprocess.Popen] = field(default_factory=list)

    def enter(self, *words: object) -> list[str]:
        """Return the command that runs ``words`` on this host."""
        return ["nsenter", f"--target={self.init_pid}", "--net", "--uts", "--ipc", "--mount",
                "--pid", f"--wd={ROOT}", "--", *map(str, words)]  # fmt: skip

    def run(self, *words: object, timeout: float = 150, **settings) -> subprocess.CompletedProcess:
        """Run a command on this host to its end."""
        process = self.start(*words, **settings)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            stdout, stderr = process.communicate(timeout=20)
            raise AssertionError(f"{words} ran over {timeout} s\n{stdout}\n{stderr}") from None
        return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)

    def start(self, *words: object, env=None, **settings) -> subprocess.Popen:
        """Start a command on this host, which ends with the host at the latest."""
        process = subprocess.Popen(
            self.enter(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                # As for who comes through ssh: its own /dev/shm has its leases.
                "POPRUN_LEASES": "",
                # A host has its own /tmp, and nothing of this machine's folders in there.
                "TMPDIR": "/tmp",
                **(env or {}),
            },
            **settings,
        )
        self._started = [each for each in self._started if each.returncode is None] + [process]
        return process

    def poprun(
        self, *words: object, timeout: float = 150, **settings
    ) -> subprocess.CompletedProcess:
        """Run ``poprun-py`` on this host to its end."""
        return self.run(sys.executable, "-m", "poprun_py", *words, timeout=timeout, **settings)

    def link(self, state: str) -> None:
        """Pull the host's cable (``down``) or put it back (``up``)."""
        _run(
            "nsenter", f"--target={self.switch_pid}", "--net", "ip", "link", "set", self.port, state
        )

    def wire(self, faults: Faults | None) -> None:
        """Have packets from and to the host lost or late; None puts the good wire back.

        Raises:
            RuntimeError: the kernel permits no such wire.
        """
        if faults is None:
            if self._wire is not None:
                self._wire.communicate(timeout=20)
            self._wire = None
            return
        if self._wire is None:
            self._wire = subprocess.Popen(
                ["nsenter", f"--target={self.switch_pid}", "--net",
                 sys.executable, str(Path(__file__).with_name("wire.py")), self.port],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PATH": _PATH},
            )  # fmt: skip
            self._ask_wire("", "ready")
        self._ask_wire(f"{json.dumps(asdict(faults))}\n", "done")

    def _ask_wire(self, line: str, answer: str) -> None:
        assert self._wire is not None
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._wire.stdin.write(line)
        self._wire.stdin.flush()
        if self._wire.stdout.readline() != f"{answer}\n":
            raise RuntimeError(f"{self.name} has no wire of its own: is there {TAP_DEVICE}?")

    def readdress(self, address: str) -> None:
        """Give the host another address in place of the one that it has; nobody is told."""
        self._on_host("ip", "address", "flush", "dev", "eth0", "scope", "global")
        self._on_host("ip", "address", "add", f"{address}/24", "dev", "eth0")

    def _on_host(self, *words: str) -> None:
        _run("nsenter", f"--target={self.init_pid}", "--net", *words)

    def repair(self) -> None:
        """Undo what ``link``, ``wire`` and ``readdress`` have done."""
        self.wire(None)
        self.link("up")
        self.readdress(self.address)

    def shape(self, rate: str, delay: str | None = None) -> None:
        """Limit both directions of the host's link to ``rate``, such as ``1gbit``; add ``delay``.

        The rate is kept by tbf, which every kernel with traffic control has. A delay needs netem,
        which many kernels made for virtual machines are built without.

        Raises:
            RuntimeError: a delay is asked for and the kernel has no netem; the link stays as it is.
        """
        rule = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        if delay is not None:
            rule = ["netem", "limit", "20000", "rate", rate, "delay", delay]
        for target, device in ((self.switch_pid, self.port), (self.init_pid, "eth0")):
            try:
                _run("nsenter", f"--target={target}", "--net", "tc", "qdisc", "replace",
                     "dev", device, "root", *rule)  # fmt: skip
            except RuntimeError as error:
                if delay is None:
                    raise
                reason = str(error).rpartition(": ")[2].strip()
                raise RuntimeError(
                    f"a delay of {delay} needs netem in the kernel; tc says: {reason}"
                ) from None

    def processes(self, text: str) -> list[str]:
        """Return the command lines of this host's processes that hold ``text``."""
        listed = self.run("ps", "-eo", "args").stdout.splitlines()
        return [line for line in listed if text in line and not line.startswith("ps ")]

    def kill(self) -> None:
        """Switch the host off: all its processes die at once."""
        if not self.is_alive:
            return
        self.is_alive = False
        if not self.init_pid:  # the host never started
            self.holder.kill()
            self.holder.wait()
            return
        if self._wire is not None:
            self._wire.communicate(timeout=20)
        # A host without power sends nothing. This kernel would: while the processes end one by one,
        # their connections close and their ports refuse.
        self.link("down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        self.holder.wait(10)

    def end_commands(self) -> None:
        """Wait for the commands that no test has waited for, after the host was switched off."""
        for process in self._started:
            if process.returncode is None:
                process.kill()
                process.communicate()


class Lab:
    """Hosts ``node0``, ``node1``, ... on one switch; a context manager.

    All hosts see ``visible``, the parent of ``folder`` and this project; ``/tmp`` is each host's
    own otherwise. With ``names`` they have those; their only addresses beside loopback's are in
    ``subnet``.
    """

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        visible: tuple[Path, ...] = (),
        *,
        names: tuple[str, ...] = (),
        subnet: str = f"{SUBNET}.0/24",
    ) -> None:
        self.visible = (*visible, folder.parent, ROOT)
        self.folder = folder
        self.num_hosts = num_hosts
        self._names = names or tuple(f"node{index}" for index in range(num_hosts))
        self._subnet = ipaddress.ip_network(subnet)
        self.hosts: list[LabHost] = []
        self._switch: subprocess.Popen | None = None

    def __enter__(self) -> Lab:
        try:
            with _locked_home(fcntl.LOCK_SH):
                with contextlib.suppress(FileExistsError):
                    _SSH_FOLDER.mkdir()
                    _SSH_FOLDER.chmod(_MODE_OF_OURS)
                self._make_keys()
                self._start_switch()
                for index in range(self.num_hosts):
                    self._add_host(index)
                self._wait_for_sshd()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> LabHost:
        return self.hosts[index]

    def close(self) -> None:
        """End every host and the switch; their namespaces go with them."""
        for host in self.hosts:
            host.kill()
            host.end_commands()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        # The last of several labs removes the folder: the others' hosts would lose it.
        with contextlib.suppress(OSError), _locked_home(fcntl.LOCK_EX):
            is_ours = stat.S_IMODE(_SSH_FOLDER.stat().st_mode) == _MODE_OF_OURS
            if is_ours and not _is_mounted(_SSH_FOLDER):
                _SSH_FOLDER.rmdir()

    def switch_on(self, index: int) -> None:
        """Switch a host on again after ``kill()``; its memory and ``/tmp`` are empty.

        The caller's thread must live as long as the host.
        """
        assert self._switch is not None
        old = self.hosts[index]
        old.end_commands()
        # The kernel removes the network of a host some time after its last process.
        with contextlib.suppress(RuntimeError):
            _run("nsenter", f"--target={self._switch.pid}", "--net", "ip", "link", "del", old.port)
        self._add_host(index)

    def names(self, count: int | None = None) -> str:
        """Return the first hosts' names as ``--host`` takes them."""
        return ",".join(host.name for host in self.hosts[:count])

    # --- building -------------------------------------------------------------------------

    def _make_keys(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "user_key")
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        known = []
        for index, name in enumerate(self._names):
            folder = self.folder / name
            folder.mkdir()
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
            address = self._subnet[index + 1]
            lines.append(f"{address} {name}")
            kind, key = (folder / "host_key.pub").read_text().split()[:2]
            known.append(f"{name},{name.lower()},{address} {kind} {key}\n")
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        for name in self._names:
            ssh = self.folder / name / "ssh"
            ssh.mkdir(mode=0o700)
            shutil.copy(self.folder / "user_key", ssh / "id_ed25519")
            shutil.copy(self.folder / "user_key.pub", ssh / "authorized_keys")
            (ssh / "known_hosts").write_text("".join(known))
            (ssh.parent / "sshd_config").write_text(_SSHD.format(folder=ssh.parent, ssh=ssh))

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link add switch type bridge && "
             "ip link set switch up && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": _PATH},
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != b"ready\n":
            raise RuntimeError("no bridge in a network namespace")
        self._switch.stdout.close()

    def _add_host(self, index: int) -> None:
        assert self._switch is not None
        name = self._names[index]
        folder = self.folder / name
        script = _BECOME_HOST.format(
            name=name,
            folder=folder,
            shared=self.folder,
            visible=" ".join(str(path) for path in self.visible if path.is_relative_to("/tmp")),
            ssh=folder / "ssh",
            sshd=shutil.which("sshd", path=_PATH),
        )
        with (folder / "log").open("wb") as log:
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc",
                 "--kill-child=SIGKILL", "sh", "-c", script],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "PATH": _PATH},
                preexec_fn=_die_with_parent,
            )  # fmt: skip
        host = LabHost(
            name=name,
            address=str(self._subnet[index + 1]),
            folder=folder,
            ssh=folder / "ssh",
            holder=holder,
            port=f"port{index}",
            switch_pid=self._switch.pid,
        )
        self.hosts[index : index + 1] = [host]
        host.init_pid = _first_child(holder)
        inside_switch = ("nsenter", f"--target={self._switch.pid}", "--net")
        # A host that is switched on again keeps its address, which the others have cached.
        _run(*inside_switch, "ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0",
             "address", f"02:00:00:00:00:{index:02x}", "netns", host.init_pid)  # fmt: skip
        _run(*inside_switch, "ip", "link", "set", host.port, "master", "switch", "up")
        inside_host = ("nsenter", f"--target={host.init_pid}", "--net")
        # An IPv6 address is usable at once if nobody is asked whether it has it too.
        nodad = ("nodad",) if self._subnet.version == 6 else ()
        _run(*inside_host, "ip", "address", "add", f"{host.address}/{self._subnet.prefixlen}",
             "dev", "eth0", *nodad)  # fmt: skip
        _run(*inside_host, "ip", "link", "set", "eth0", "up")

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 60
        first = self.hosts[0]
        for host in self.hosts:
            while first.run("ssh", "-oBatchMode=yes", host.name, "true").returncode:
                if time.monotonic() > deadline:
                    log = (host.folder / "log").read_text()
                    raise RuntimeError(f"sshd of {host.name} does not answer: {log}")
                time.sleep(0.05)


@contextlib.contextmanager
def _locked_home(operation: int) -> Iterator[None]:
    """Hold a lock against other labs, also of other processes, that make or remove ``~/.ssh``."""
    descriptor = os.open(_SSH_FOLDER.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _first_child(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        pids = children.read_text().split()
        if pids and _in_own_network(int(pids[0])):
            return int(pids[0])
        time.sleep(0.005)
    raise RuntimeError("a host's first process did not start")


def _is_mounted(folder: Path) -> bool:
    """Tell whether a process has something mounted at ``folder``, in whichever namespace."""
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if f" {folder} " in mounts.read_text():
                return True
    return False


def _in_own_network(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net")
    except OSError:
        return False
