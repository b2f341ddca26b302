"""One dialect for each MPI: a launch in neutral terms -> the command, a tuple of strings.

A dialect knows how its ``mpirun`` spells things and nothing else. Which MPI it is: mpi_install.py.
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
# Linux takes 2 MiB of arguments and environment together, unless the stack is limited.
_MAX_BYTES = 1_500_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Mpi:
    """An installed MPI: the path of its ``mpirun`` and which implementation it is.

    ``library`` is the MPI library that programs must load; empty where they find it by themselves.
    """

    path: str
    kind: str
    version: str = ""
    library: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One instance's part of the command: variables by value and by name, and what it runs.

    ``count`` equal instances may share a part.
    """

    count: int = 1
    variables: tuple[tuple[str, str], ...]
    last_variables: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    local_args: tuple[str, ...] = ()
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiRequest:
    """Everything a dialect needs to spell the command.

    ``hosts`` is empty when the job stays on this machine, else pairs of name and instances. Then
    ``agent`` starts a command on another host (empty: Slurm does), and ``network`` is the interface
    or CIDR of the traffic; ``network_is_ours`` tells whether this machine is on it too, at
    ``address`` where that is known, ``is_launched_inside`` whether it is one of the hosts. A job
    that stays here ignores an allocation around it that has other hosts: ``ignores_slurm``,
    ``ignores_host_file``.
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


def shield(word: str) -> str:
    """Return a word of the program's that no mpirun takes for its own; the wrapper undoes it.

    A lone ``:`` would begin another part of the command: it becomes ``%:``, and that ``%%:``.
    """
    return f"%{word}" if word.endswith(":") and not word[:-1].strip("%") else word


def make_command(mpi: Mpi, request: MpiRequest) -> tuple[str, ...]:
    """Return the command that starts every instance of ``request`` with ``mpi``."""
    return _DIALECTS[mpi.kind](mpi.path, request)


def network_of_mpirun(command: Sequence[str], network: str) -> str | None:
    """Return the network on which alone a command's daemons connect to mpirun; None if any may do.

    ``network`` is the one between the hosts, empty where that is not known.
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


def collapsed(request: MpiRequest, option: str = "--instance-mpi-local-args") -> MpiRequest:
    """Return ``request`` with one part for all instances; what differs between them is left out.

    Raises:
        UsageError: an instance has MPI arguments of its own; the message names ``option``.
    """
    first = request.contexts[0]
    if any(context.local_args != first.local_args for context in request.contexts):
        raise UsageError(
            f"{option}: the command for {len(request.contexts)} instances is too "
            "long for parts of their own; use --mpi-local-args"
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
    """Spell an Open MPI command in PopRun's order: user's global arguments first, ours after."""
    user = request.global_args
    words = [path, *user]
    for setting in settings:
        if not _is_set_by_user(user, setting):
            words += setting
    if not request.hosts and not _is_set_by_user(user, ("--mca", "btl_tcp_if_exclude")):
        # Among others, shared memory does: this is for what a program starts later, and in its
        # absence. There is no need to be reached from elsewhere.
        alone = ("--mca", "btl_tcp_if_include", LOOPBACK)
        words += () if _is_set_by_user(user, alone) else alone
    if request.hosts:
        words += ["-H", ",".join(f"{name}:{slots}" for name, slots in request.hosts)]
    places = [f"{name}:{slots}" for name, slots in request.hosts for _ in range(slots)]
    for number, context in enumerate(request.contexts):
        words += [":"] if number else []
        words += ["-np", str(context.count)]
        if request.hosts and len(request.contexts) > 1:
            # With the list alone, Open MPI 5 starts each part at the launching machine's host.
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
    """Tell whether the user's arguments already decide a setting, so that theirs wins."""
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
        # Waiting instances share cores with working ones: there may be more of them than slots, and
        # the plan decides placement.
        # With hosts their slots say the same, and this would put every instance on the first one.
        settings.append(("--map-by", ":OVERSUBSCRIBE"))
    if request.ignores_slurm:
        settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
    if request.ignores_host_file:
        settings.append(("--prtemca", "prte_default_hostfile", "none"))
    if request.allow_run_as_root:
        settings.append(("--allow-run-as-root",))
    # An instance that ends with an error must not wait in MPI_Finalize for the others.
    settings.append(("--mca", "async_mpi_finalize", "1"))
    # The launcher asks instances to stop and waits; mpirun's own limit must come after that.
    limit = str(int(request.grace_seconds) + 2)
    settings.append(("--prtemca", "odls_base_sigkill_timeout", limit))
    if request.hosts:
        settings += _between_hosts(path, request, "prtemca", "plm_ssh", "prte_if_include")
        # Daemons notice the loss of a host within half a minute instead of eight, but after the
        # launcher, whose report of it is better.
        settings += [
            ("--prtemca", "oob_tcp_keepalive_time", "15"),
            ("--prtemca", "oob_tcp_keepalive_intvl", "5"),
            ("--prtemca", "oob_tcp_keepalive_probes", "3"),
        ]
        if request.agent:
            # Inside a Slurm allocation too, neither its tasks nor its starter are used then.
            settings += [("--prtemca", "plm", "ssh"), ("--prtemca", "ras", "^slurm")]
        else:
            # Without it, a step of ours that runs already keeps Slurm from starting another.
            settings.append(("--prtemca", "plm_slurm_args", "--overlap"))
            if not request.is_launched_inside:
                # Otherwise instances start on this machine, which is none of the hosts.
                settings.append(("--prtemca", "ras", "^slurm"))
    if request.fast_start:
        # Probing every transport takes 1.2 s; without a special network these are all it needs.
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
    # It sleeps for this long after any instance that left MPI without finalising it. Instances
    # that use their grace time have not ended for mpirun: their wrapper still runs.
    settings.append(("--mca", "odls_base_sigkill_timeout", "1"))
    if request.hosts:
        settings += _between_hosts(path, request, "mca", "plm_rsh", "oob_tcp_if_include")
    if request.fast_start:
        settings += [("--mca", "pml", "ob1"), ("--mca", "btl", "self,vader,tcp")]
    return _open_mpi(path, request, settings)


def _between_hosts(
    path: str, request: MpiRequest, daemon: str, starter: str, control: str
) -> list[tuple[str, ...]]:
    """Return what Open MPI needs to start on other hosts and to talk between them.

    Args:
        path: mpirun, whose installation is expected at the same place everywhere.
        request: what to start.
        daemon: the flag for parameters of the daemons.
        starter: the component that starts them through a remote shell.
        control: the parameter for the network of the daemons.
    """
    settings: list[tuple[str, ...]] = []
    folder = Path(path).parent
    # The files of a system's own MPI lie under no common prefix; its daemons find it anyway.
    if folder.name == "bin" and folder.parent not in (Path("/usr"), Path("/")):
        settings.append(("--prefix", str(folder.parent)))
    if request.agent:
        settings += [
            (f"--{daemon}", f"{starter}_agent", " ".join(request.agent)),
            # Only this machine needs a key for the others.
            (f"--{daemon}", f"{starter}_no_tree_spawn", "1"),
        ]
    if request.network:
        settings.append(("--mca", "btl_tcp_if_include", request.network))
        if request.network_is_ours:
            settings.append((f"--{daemon}", control, request.network))
    # By "put" the requests of one direction wait behind the data of the other: exchanging 25 MB at
    # 1 Gbit/s took 220 or 440 ms by chance, and takes 220 ms by "send".
    settings.append(("--mca", "btl_tcp_flags", "send,inplace"))
    # Waiting instances yield a core that they share with working ones.
    settings.append(("--mca", "mpi_yield_when_idle", "1"))
    return settings


# --- MPICH ------------------------------------------------------------------------------------


def _mpich(path: str, request: MpiRequest) -> tuple[str, ...]:
    words = [path, *request.global_args]
    if not request.hosts and "UCX_NET_DEVICES" not in request.global_args:
        words += ["-genv", "UCX_NET_DEVICES", LOOPBACK]
    user = {word.lstrip("-") for word in request.global_args}
    if address := request.address if request.hosts else _LOOPBACK_ADDRESS:
        # Where mpirun's proxies connect to it: the name of this machine may be another's address.
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
    """Spell Open MPI's ``-x NAME`` and ``-x NAME=VALUE`` in MPICH's way; leave the rest."""
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


_DIALECTS = {OPEN_MPI_5: _open_mpi_5, OPEN_MPI_4: _open_mpi_4, MPICH: _mpich}
