"""Command lines of Open MPI 5, Open MPI 4 and MPICH for one description of a launch.

Pure. installed_mpi.py finds the ``mpirun`` and tells which implementation it is.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from popdist_py.environment import LOOPBACK
from poprun_py.errors import UsageError

OPEN_MPI_5 = "Open MPI 5"
OPEN_MPI_4 = "Open MPI 4"
MPICH = "MPICH"

_LOOPBACK_ADDRESS = "127.0.0.1"
# Linux accepts 2 MiB of arguments and environment together, or less if the stack is limited.
_MAX_BYTES = 1_500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An installed MPI with the path of its ``mpirun``, its implementation and its version.

    ``library`` is the MPI library that programs must load; empty if they find it without help.
    """

    path: str
    kind: str
    version: str = ""
    library: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One instance's part of the command line (Open MPI calls it an app context).

    Attributes:
        count: The number of equal instances that share the part.
        variables: The variables that the command sets.
        last_variables: Variables that stand after the user's arguments.
        forwarded: The names of variables that mpirun forwards from its own environment.
        local_args: The user's MPI arguments.
        command: The program with its arguments.
    """

    count: int = 1
    variables: tuple[tuple[str, str], ...]
    last_variables: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiRequest:
    """A launch, described independently of the MPI implementation.

    Attributes:
        contexts: The parts of the command.
        hosts: Pairs of host name and number of instances; empty for a job on this machine.
        agent: The command that starts a program on another host; empty if Slurm starts it.
        network: The interface or CIDR of the traffic between hosts; empty for any.
        network_is_ours: Whether this machine is also on that network.
        address: The address of this machine on that network; empty if it is not known.
        is_launched_inside: Whether this machine is one of the hosts.
        ignores_slurm: Whether a job on this machine ignores a Slurm allocation of other hosts.
        ignores_host_file: Whether a job on this machine ignores the default host file.
        global_args: The user's arguments for mpirun.
        allow_run_as_root: Whether root may start the job.
        fast_start: Whether Open MPI skips the search for fast networks.
        grace_seconds: The time that instances have to end after SIGTERM.
    """

    contexts: tuple[Context, ...]
    hosts: tuple[tuple[str, int], ...] = ()
    agent: tuple[str, ...] = ()
    network: str = ""
    network_is_ours: bool = True
    address: str = ""
    is_launched_inside: bool = True
    ignores_slurm: bool = False
    ignores_host_file: bool = False
    global_args: tuple[str, ...] = ()
    allow_run_as_root: bool = True
    fast_start: bool = True
    grace_seconds: float = 5


def escape_colon(word: str) -> str:
    """Return a word of the program in a form that mpirun does not interpret.

    mpirun reads a lone ``:`` as the beginning of another part. It becomes ``%:``, and ``%:``
    becomes ``%%:``. The wrapper restores the word.
    """
    return f"%{word}" if word.endswith(":") and not word[:-1].strip("%") else word


def make_command(mpi: Mpi, request: MpiRequest) -> tuple[str, ...]:
    """Return the command that starts every instance of ``request`` with ``mpi``."""
    return _COMMANDS[mpi.kind](mpi.path, request)


def split_command(command: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the parts of a command, which are separated by ``:``."""
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return [tuple(part) for part in parts]


def network_of_mpirun(command: Sequence[str], network: str) -> str | None:
    """Return the only network that the command's daemons may use to connect to mpirun.

    None means any network.

    ``network`` is the network between the hosts; empty if it is not known.
    """
    for word, value in pairwise(command):
        if word in {"prte_if_include", "oob_tcp_if_include"}:
            return value if "," not in value else None
        if word == "-localhost":
            return network or None
    return None


def end_signal_of_mpirun(command: Sequence[str]) -> int:
    """Return the signal that makes a command's mpirun end its instances as SIGTERM would.

    SIGTERM itself is kept from mpirun, because schedulers send it to all processes of a job. Open
    MPI accepts SIGHUP instead. MPICH does not catch SIGHUP, but accepts SIGQUIT.
    """
    return signal.SIGHUP if "odls_base_sigkill_timeout" in command else signal.SIGQUIT


def is_too_long(command: Sequence[str]) -> bool:
    """Tell whether the kernel may refuse ``command`` for its length."""
    return sum(len(word.encode(errors="surrogateescape")) + 9 for word in command) > _MAX_BYTES


def with_one_part(request: MpiRequest, option: str = "--instance-mpi-local-args") -> MpiRequest:
    """Return ``request`` with one part for all instances, with the variables that they share.

    Raises:
        UsageError: An instance has its own MPI arguments, given with ``option``.
    """
    first = request.contexts[0]
    if any(context.local_args != first.local_args for context in request.contexts):
        raise UsageError(
            f"{option}: the command is too long with a part for each of "
            f"{len(request.contexts)} instances; use --mpi-local-args"
        )
    common = set(first.variables).intersection(*(c.variables for c in request.contexts))
    shared = tuple(pair for pair in first.variables if pair in common)
    return replace(
        request,
        contexts=(replace(first, count=len(request.contexts), variables=shared),),
    )


# --- Open MPI ---------------------------------------------------------------------------------


def _open_mpi(
    path: str, request: MpiRequest, settings: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the command with the user's global arguments first, as in PopRun."""
    user = request.global_args
    words = [path, *user]
    for setting in settings:
        if not _is_set_by_user(user, setting):
            words += setting
    if not request.hosts and not _is_set_by_user(user, ("--mca", "btl_tcp_if_exclude")):
        # Instances on one machine use shared memory. TCP is for processes that the program starts
        # later, or if shared memory is missing, so the loopback interface is enough.
        alone = ("--mca", "btl_tcp_if_include", LOOPBACK)
        words += () if _is_set_by_user(user, alone) else alone
    if request.hosts:
        words += ["-H", ",".join(f"{name}:{slots}" for name, slots in request.hosts)]
    places = [f"{name}:{slots}" for name, slots in request.hosts for _ in range(slots)]
    for number, context in enumerate(request.contexts):
        words += [":"] if number else []
        words += ["-np", str(context.count)]
        if request.hosts and len(request.contexts) > 1:
            # Without --host, Open MPI 5 starts every part on the host of the launcher.
            words += ["--host", places[number]]
        for name, value in context.variables:
            words += ["-x", f"{name}={value}"]
        for name in context.forwarded:
            words += ["-x", name]
        words += context.local_args
        for name, value in context.last_variables:
            words += ["-x", f"{name}={value}"]
        words += context.command
    return tuple(words)


def _is_set_by_user(user: Sequence[str], setting: tuple[str, ...]) -> bool:
    """Tell whether the user's arguments already contain a setting, which then overrides ours."""
    flag = setting[0].lstrip("-")
    spelled = [word.lstrip("-") for word in user]
    if flag in {"mca", "prtemca", "pmixmca"}:
        return any(
            spelled[i] in {"mca", "prtemca", "pmixmca", "gmca"} and user[i + 1] == setting[1]
            for i in range(len(user) - 1)
        )
    equivalents = {
        "map-by": {"map-by", "oversubscribe", "nooversubscribe", "npernode", "N"},
        "oversubscribe": {"map-by", "oversubscribe", "nooversubscribe"},
        "allow-run-as-root": {"allow-run-as-root"},
    }.get(flag, {flag})
    return any(word.partition("=")[0] in equivalents for word in spelled)


def _open_mpi_5(path: str, request: MpiRequest) -> tuple[str, ...]:
    settings: list[tuple[str, ...]] = [("--bind-to", "none")]
    if not request.hosts:
        # There may be more instances than slots, because the plan decides placement. For other
        # hosts, their numbers of slots allow that. This setting would start all instances on the
        # first host.
        settings.append(("--map-by", ":OVERSUBSCRIBE"))
    if request.ignores_slurm:
        settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
    if request.ignores_host_file:
        settings.append(("--prtemca", "prte_default_hostfile", "none"))
    if request.allow_run_as_root:
        settings.append(("--allow-run-as-root",))
    # An instance that ends with an error must not wait for the others in MPI_Finalize.
    settings.append(("--mca", "async_mpi_finalize", "1"))
    # The launcher asks instances to stop and waits for them. mpirun's own limit must be longer.
    limit = str(int(request.grace_seconds) + 2)
    settings.append(("--prtemca", "odls_base_sigkill_timeout", limit))
    if request.hosts:
        settings += _between_hosts(path, request, "prtemca", "plm_ssh", "prte_if_include")
        # With these settings, daemons notice the loss of a host within half a minute instead of
        # eight minutes, but after the launcher, whose report is better.
        settings += [
            ("--prtemca", "oob_tcp_keepalive_time", "15"),
            ("--prtemca", "oob_tcp_keepalive_intvl", "5"),
            ("--prtemca", "oob_tcp_keepalive_probes", "3"),
        ]
        if request.agent:
            # Even inside a Slurm allocation, neither its list of tasks nor srun is used.
            settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
        else:
            # With this, Slurm starts the step even while another step of the allocation is running.
            settings.append(("--prtemca", "plm_slurm_args", "--overlap"))
            if not request.is_launched_inside:
                # Otherwise instances start on this machine, although it is not one of the hosts.
                settings.append(("--prtemca", "ras", "^slurm"))
    if request.fast_start:
        # Probing every transport takes 1.2 s. Without a special network, these are sufficient.
        settings += [
            ("--mca", "pml", "ob1"),
            ("--mca", "btl", "self,sm,tcp"),
            ("--mca", "osc", "^ucx"),
        ]
    return _open_mpi(path, request, settings)


def _open_mpi_4(path: str, request: MpiRequest) -> tuple[str, ...]:
    settings: list[tuple[str, ...]] = [("--bind-to", "none"), ("--oversubscribe",)]
    if request.ignores_slurm:
        settings += [("--mca", "plm", "rsh"), ("--mca", "ras", "^slurm")]
    if request.ignores_host_file:
        settings.append(("--mca", "orte_default_hostfile", "none"))
    if request.allow_run_as_root:
        settings.append(("--allow-run-as-root",))
    settings.append(("--mca", "async_mpi_finalize", "1"))
    # mpirun sleeps for this long after an instance that ended without MPI_Finalize. The grace time
    # of an instance is not affected, because its wrapper runs until the instance has ended.
    settings.append(("--mca", "odls_base_sigkill_timeout", "1"))
    if request.hosts:
        settings += _between_hosts(path, request, "mca", "plm_rsh", "oob_tcp_if_include")
    if request.fast_start:
        settings += [("--mca", "pml", "ob1"), ("--mca", "btl", "self,vader,tcp")]
    return _open_mpi(path, request, settings)


def _between_hosts(
    path: str, request: MpiRequest, daemon: str, starter: str, control: str
) -> list[tuple[str, ...]]:
    """Return the settings that Open MPI needs to start instances on other hosts and connect them.

    The installation of the mpirun must have the same path on every host. ``daemon`` is the flag for
    parameters of Open MPI's daemons, ``starter`` the component that starts them through a remote
    shell, and ``control`` the parameter for their network.
    """
    settings: list[tuple[str, ...]] = []
    folder = Path(path).parent
    # The files of the system's MPI do not share a prefix. Its daemons are found without one.
    if folder.name == "bin" and folder.parent not in (Path("/usr"), Path("/")):
        settings.append(("--prefix", str(folder.parent)))
    if request.agent:
        settings += [
            (f"--{daemon}", f"{starter}_agent", " ".join(request.agent)),
            # Only this machine needs an ssh key for the other hosts.
            (f"--{daemon}", f"{starter}_no_tree_spawn", "1"),
        ]
    if request.network:
        settings.append(("--mca", "btl_tcp_if_include", request.network))
        if request.network_is_ours:
            settings.append((f"--{daemon}", control, request.network))
    # With "put", the requests of one direction wait behind the data of the other direction.
    # Exchanging 25 MB at 1 Gbit/s took 220 or 440 ms by chance; with "send" it takes 220 ms.
    settings.append(("--mca", "btl_tcp_flags", "send,inplace"))
    # Waiting instances yield their core to instances that compute on it.
    settings.append(("--mca", "mpi_yield_when_idle", "1"))
    return settings


# --- MPICH ------------------------------------------------------------------------------------


def _mpich(path: str, request: MpiRequest) -> tuple[str, ...]:
    words = [path, *request.global_args]
    if not request.hosts and "UCX_NET_DEVICES" not in request.global_args:
        words += ["-genv", "UCX_NET_DEVICES", LOOPBACK]
    user = {word.lstrip("-") for word in request.global_args}
    if address := request.address if request.hosts else _LOOPBACK_ADDRESS:
        # mpirun's proxies connect to this address. The name of this machine may resolve to another.
        words += [] if user & {"localhost", "iface"} else ["-localhost", address]
    if "bind-to" not in user:
        words += ["-bind-to", "none"]
    if request.hosts:
        words += ["-hosts", ",".join(f"{name}:{slots}" for name, slots in request.hosts)]
    for number, context in enumerate(request.contexts):
        words += [":"] if number else []
        words += ["-n", str(context.count)]
        for name, value in context.variables:
            words += ["-env", name, value]
        if context.forwarded:
            words += ["-envlist", ",".join(context.forwarded)]
        words += _translate_local_args(context.local_args)
        for name, value in context.last_variables:
            words += ["-env", name, value]
        words += context.command
    return tuple(words)


def _translate_local_args(args: Sequence[str]) -> list[str]:
    """Translate Open MPI's ``-x NAME`` and ``-x NAME=VALUE`` for MPICH; keep all other words."""
    words: list[str] = []
    names: list[str] = []
    position = 0
    while position < len(args):
        if args[position] in {"-x", "--x"} and position + 1 < len(args):
            name, equals, value = args[position + 1].partition("=")
            if equals:
                words += ["-env", name, value]
            else:
                names.append(name)
            position += 2
        else:
            words.append(args[position])
            position += 1
    return [*words, *(["-envlist", ",".join(names)] if names else [])]


_COMMANDS = {OPEN_MPI_5: _open_mpi_5, OPEN_MPI_4: _open_mpi_4, MPICH: _mpich}
