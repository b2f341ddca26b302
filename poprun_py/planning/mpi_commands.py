"""The mpirun command line of a launch, for Open MPI 5, Open MPI 4 and MPICH.

The functions here only compute values. installed_mpi.py finds the installed ``mpirun``, and detects
which MPI implementation it belongs to.
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
# The greatest length of an mpirun command in bytes. Linux accepts at most 2 MiB of arguments and
# environment together, and less if the size of the stack is limited.
_MAX_BYTES = 1_500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An installed MPI with the path of its ``mpirun``, its implementation and its version.

    ``library`` is the path of the MPI library that programs must load; empty if programs find the
    library without the path.
    """

    path: str
    kind: str
    version: str = ""
    library: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One instance's part of the command line (Open MPI calls it an app context).

    Attributes:
        count: The number of instances that this part of the command starts.
        variables: The environment variables that stand before the user's MPI arguments.
        last_variables: The environment variables that stand after the user's MPI arguments.
        forwarded: The names of variables that mpirun forwards from its own environment.
        local_args: The user's MPI arguments for the instances of this part.
        command: The command that each instance runs.
    """

    count: int = 1
    variables: tuple[tuple[str, str], ...]
    last_variables: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiRequest:
    """A description of a launch that does not depend on the MPI implementation.

    Attributes:
        contexts: The parts of the mpirun command.
        hosts: Pairs of host name and number of instances; empty for a job on this machine.
        agent: The command (such as ssh) that starts programs on other hosts; empty if Slurm starts
            them.
        network: The network interface or the CIDR for traffic between hosts; empty if MPI chooses.
        network_is_ours: Whether this machine is also connected to ``network``.
        address: The address of this machine in ``network``; empty if it is not known.
        is_launched_inside: Whether this machine is one of the hosts.
        ignores_slurm: Whether a job on this machine ignores a Slurm allocation of other hosts.
        ignores_host_file: Whether a job on this machine ignores the default host file.
        global_args: The user's arguments for mpirun.
        allow_run_as_root: Whether root may start the job.
        fast_start: Whether Open MPI skips the search for fast networks.
        grace_seconds: The time in seconds between SIGTERM and the kill of instances that still run.
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
    """Return a word of the program's command line in a form that mpirun does not interpret.

    mpirun reads the word ``:`` as the separator between two parts of its command. The word ``:`` is
    therefore replaced by ``%:``, and the word ``%:`` by ``%%:``. The wrapper of each instance
    restores the words before it starts the program.
    """
    return f"%{word}" if word.endswith(":") and not word[:-1].strip("%") else word


def make_command(mpi: Mpi, request: MpiRequest) -> tuple[str, ...]:
    """Return the command that starts every instance of ``request`` with ``mpi``."""
    return _COMMANDS[mpi.kind](mpi.path, request)


def split_command(command: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the parts of an mpirun command, which are separated by the word ``:``."""
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return [tuple(part) for part in parts]


def network_of_mpirun(command: Sequence[str], network: str) -> str | None:
    """Return the network that MPI's daemons must use to connect to mpirun; None for any network.

    ``command`` is the mpirun command. ``network`` is the network between the hosts; empty if it is
    not known.
    """
    for word, value in pairwise(command):
        if word in {"prte_if_include", "oob_tcp_if_include"}:
            return value if "," not in value else None
        if word == "-localhost":
            return network or None
    return None


def end_signal_of_mpirun(command: Sequence[str]) -> int:
    """Return the signal that is sent to mpirun in place of SIGTERM to end its instances.

    The launcher shields mpirun from SIGTERM, because schedulers send SIGTERM to all processes of a
    job. The signal for Open MPI is SIGHUP. The signal for MPICH, which does not catch SIGHUP, is
    SIGQUIT.
    """
    return signal.SIGHUP if "odls_base_sigkill_timeout" in command else signal.SIGQUIT


def is_too_long(command: Sequence[str]) -> bool:
    """Tell whether ``command`` may be too long for the kernel."""
    return sum(len(word.encode(errors="surrogateescape")) + 9 for word in command) > _MAX_BYTES


def with_one_part(request: MpiRequest, option: str = "--instance-mpi-local-args") -> MpiRequest:
    """Return ``request`` with one part of the command for all instances.

    The part sets only the variables that have the same value in every instance.

    Raises:
        UsageError: An instance has its own MPI arguments, which were given with ``option``.
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


# --- commands of Open MPI ---------------------------------------------------------------------


def _open_mpi(
    path: str, request: MpiRequest, settings: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the mpirun command, with the user's global arguments first, as in PopRun."""
    user = request.global_args
    words = [path, *user]
    for setting in settings:
        if not _is_set_by_user(user, setting):
            words += setting
    if not request.hosts and not _is_set_by_user(user, ("--mca", "btl_tcp_if_exclude")):
        # On one machine, instances communicate through shared memory. Instances use TCP only if
        # shared memory is not available, or to communicate with MPI processes that the program
        # itself starts. TCP on the loopback interface is sufficient for both cases.
        alone = ("--mca", "btl_tcp_if_include", LOOPBACK)
        words += () if _is_set_by_user(user, alone) else alone
    if request.hosts:
        words += ["-H", ",".join(f"{name}:{slots}" for name, slots in request.hosts)]
    places = [f"{name}:{slots}" for name, slots in request.hosts for _ in range(slots)]
    for number, context in enumerate(request.contexts):
        words += [":"] if number else []
        words += ["-np", str(context.count)]
        if request.hosts and len(request.contexts) > 1:
            # Without --host, Open MPI 5 starts every part of the command on the launcher's host.
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
    """Tell whether the user's MPI arguments contain a setting that the launcher would add.

    The launcher leaves out a setting that the user gave, so that the user's value counts.
    """
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
        # OVERSUBSCRIBE lets Open MPI start more instances than this machine has slots, because the
        # plan decides where instances run. A job on several hosts does not need OVERSUBSCRIBE,
        # because -H gives each host enough slots. With OVERSUBSCRIBE, all instances of a job on
        # several hosts would start on the first host.
        settings.append(("--map-by", ":OVERSUBSCRIBE"))
    if request.ignores_slurm:
        settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
    if request.ignores_host_file:
        settings.append(("--prtemca", "prte_default_hostfile", "none"))
    if request.allow_run_as_root:
        settings.append(("--allow-run-as-root",))
    # An instance that ends with an error must not wait for other instances in MPI_Finalize.
    settings.append(("--mca", "async_mpi_finalize", "1"))
    # The number of seconds after which mpirun kills instances that have not ended. The launcher
    # itself kills instances after the grace time, so mpirun waits two seconds longer.
    limit = str(int(request.grace_seconds) + 2)
    settings.append(("--prtemca", "odls_base_sigkill_timeout", limit))
    if request.hosts:
        settings += _between_hosts(path, request, "prtemca", "plm_ssh", "prte_if_include")
        # With the keep-alive settings, Open MPI's daemons notice the loss of a host within 30
        # seconds instead of eight minutes. The launcher itself notices the loss even earlier, and
        # reports the loss in a clearer message.
        settings += [
            ("--prtemca", "oob_tcp_keepalive_time", "15"),
            ("--prtemca", "oob_tcp_keepalive_intvl", "5"),
            ("--prtemca", "oob_tcp_keepalive_probes", "3"),
        ]
        if request.agent:
            # Inside a Slurm allocation, these settings make mpirun use ssh instead of srun, and the
            # hosts of its command line instead of Slurm's list of tasks.
            settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
        else:
            # With --overlap, Slurm starts this job step even while another step of the allocation
            # is running.
            settings.append(("--prtemca", "plm_slurm_args", "--overlap"))
            if not request.is_launched_inside:
                # If mpirun read Slurm's list of hosts, it would start instances on the launcher's
                # machine, which is not one of the job's hosts.
                settings.append(("--prtemca", "ras", "^slurm"))
    if request.fast_start:
        # If Open MPI probes all of its transports, the start takes 1.2 s longer. The transports
        # self, sm and tcp are sufficient for hosts without a faster network than TCP.
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
    # When an instance ends without MPI_Finalize, mpirun sleeps for odls_base_sigkill_timeout
    # seconds. A short time-out does not shorten the grace time, because the wrapper of an instance
    # runs until the instance has ended.
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

    Open MPI must be installed in the same folder on every host.

    Args:
        path: The path of mpirun.
        request: The launch.
        daemon: The name of mpirun's option that sets a parameter of Open MPI's daemons.
        starter: The component of Open MPI that starts daemons through a remote shell.
        control: The parameter that sets the network of the daemons.
    """
    settings: list[tuple[str, ...]] = []
    folder = Path(path).parent
    # --prefix names the installation folder of Open MPI on other hosts. If Open MPI comes
    # from the system's packages, its files are not in one folder, and --prefix is not needed.
    if folder.name == "bin" and folder.parent not in (Path("/usr"), Path("/")):
        settings.append(("--prefix", str(folder.parent)))
    if request.agent:
        settings += [
            (f"--{daemon}", f"{starter}_agent", " ".join(request.agent)),
            # The launcher's machine starts the daemons on all hosts, so that only this machine
            # needs an ssh key.
            (f"--{daemon}", f"{starter}_no_tree_spawn", "1"),
        ]
    if request.network:
        settings.append(("--mca", "btl_tcp_if_include", request.network))
        if request.network_is_ours:
            settings.append((f"--{daemon}", control, request.network))
    # By default, Open MPI uses "put" for large messages over TCP. With "put", requests in one
    # direction wait behind the data in the other direction: exchanging 25 MB at 1 Gbit/s took
    # either 220 or 440 ms. With "send", the exchange always takes 220 ms.
    settings.append(("--mca", "btl_tcp_flags", "send,inplace"))
    # Instances that wait for a message shall yield their core to instances that compute on it.
    settings.append(("--mca", "mpi_yield_when_idle", "1"))
    return settings


# --- commands of MPICH ------------------------------------------------------------------------


def _mpich(path: str, request: MpiRequest) -> tuple[str, ...]:
    words = [path, *request.global_args]
    if not request.hosts and "UCX_NET_DEVICES" not in request.global_args:
        words += ["-genv", "UCX_NET_DEVICES", LOOPBACK]
    user = {word.lstrip("-") for word in request.global_args}
    if address := request.address if request.hosts else _LOOPBACK_ADDRESS:
        # MPICH's proxies on the hosts connect to mpirun at the address that -localhost gives.
        # Without -localhost, the proxies resolve the name of the launcher's machine, which may give
        # a different address.
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
    """Translate Open MPI's ``-x NAME`` and ``-x NAME=VALUE`` for MPICH; keep other arguments."""
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
