"""The mpirun command line of a launch, with the MPI arguments of the user."""

from __future__ import annotations

import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from popdist_py.environment import LOOPBACK
from poprun_py.errors import UsageError
from poprun_py.instance.binding import THREAD_VARIABLES
from poprun_py.machines.host_list import DEFAULT_HOST_FILES
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.option_origins import Origin
from poprun_py.planning.hosts_and_mpi import PlanInputs
from poprun_py.planning.installed_mpi import MPICH, OPEN_MPI_4, OPEN_MPI_5
from poprun_py.planning.instance_variables import FORWARDED_VARIABLES, TARGET_OPTIONS, Pairs
from poprun_py.planning.instances_on_hosts import Topology

if TYPE_CHECKING:
    from poprun_py.machines.host_checks import ProbedHosts

_LOOPBACK_ADDRESS = "127.0.0.1"
# The maximum length of an mpirun command in bytes. Linux accepts at most 2 MiB of arguments and
# environment variables, and less if the size of the stack is limited.
_MAX_BYTES = 1_500_000
_WRAPPER = str(Path(__file__).parents[1] / "instance" / "start_wrapper.py")
# Environment variables that the wrapper of an instance needs to connect to the supervisor. Every
# user of a host can read command lines, so the mpirun command does not contain the values of
# POPRUN_CONTROL and POPRUN_TOKEN.
_TO_REMOTE = ("POPRUN_CONTROL", "POPRUN_TOKEN")

# --- the user's MPI arguments -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiArguments:
    """The words of --mpi-global-args, --mpi-local-args and --instance-mpi-local-args.

    ``of_instance`` maps the index of an instance to the words that are for this instance only.
    """

    for_mpirun: tuple[str, ...] = ()
    of_every_instance: tuple[str, ...] = ()
    of_instance: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def local(self, index: int) -> tuple[str, ...]:
        """Return the user's MPI arguments for one instance."""
        return (*self.of_every_instance, *self.of_instance.get(index, ()))

    def names_for_any(self, environ: Mapping[str, str]) -> frozenset[str]:
        """Return the names of all variables that the MPI arguments set for any instance."""
        words = (self.of_every_instance, *self.of_instance.values())
        return frozenset(name for each in words for name in variables_set_by(each, environ))


def split_mpi_arguments(config: LaunchConfig) -> tuple[LaunchConfig, MpiArguments]:
    """Split the MPI arguments of ``config`` into words.

    Open MPI's argument ``--output-filename DIR`` is removed, because the output of the instances
    does not pass through mpirun. If the option ``--output-dir`` is not given, DIR becomes the value
    of ``--output-dir``.

    Raises:
        UsageError: A quotation mark is missing in the MPI arguments, or an MPI argument is for an
            instance that does not exist.
    """
    folder, by_option = None, []
    for text in config.mpi_global_args:
        words, named = _without_output_filename(split_args(text, config.named("mpi_global_args")))
        by_option.append(words)
        folder = named if named is not None else folder
    arguments = MpiArguments(
        for_mpirun=tuple(word for words in by_option for word in words),
        of_every_instance=tuple(
            word
            for text in config.mpi_local_args
            for word in split_args(text, config.named("mpi_local_args"))
        ),
        of_instance=_by_instance(config),
    )
    if folder is None:
        return config, arguments
    origin = Origin(config.origin("mpi_global_args").source, "--output-filename")
    config = replace(
        config,
        mpi_global_args=tuple(map(shlex.join, by_option)),
        output_dir=config.output_dir or folder,
        origins=config.origins if config.output_dir else {**config.origins, "output_dir": origin},
    )
    return config, arguments


def split_args(text: str, option: str) -> tuple[str, ...]:
    """Split a string of arguments into words, as a shell would.

    Raises:
        UsageError: A quotation mark is missing in ``text``, the value of the option ``option``.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{option} {text!r}: {str(error).lower()}; expected arguments quoted as in a shell"
        ) from None


def _without_output_filename(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Remove every ``--output-filename FOLDER``; return the other words and the last FOLDER."""
    rest, others, folder = list(words), [], None
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        is_option = name.startswith("-") and name.lstrip("-") == "output-filename"
        if is_option and (equals or rest):
            folder = (value if equals else rest.pop(0)).partition(":")[0]
        else:
            others.append(word)
    return others, folder


def _by_instance(config: LaunchConfig) -> dict[int, tuple[str, ...]]:
    option = config.named("instance_mpi_local_args")
    by_instance: dict[int, tuple[str, ...]] = {}
    for entry in config.instance_mpi_local_args:
        index, colon, text = entry.partition(":")
        if not colon or not index.isascii() or not index.isdigit() or len(index) > 9:
            raise UsageError(f'{option} {entry!r}: expected INDEX:"ARGS"')
        if int(index) >= config.num_instances:
            raise UsageError(
                f"{option} {entry!r}: expected the index of an instance, from 0 to "
                f"{config.num_instances - 1}"
            )
        words = split_args(text, option)
        by_instance[int(index)] = (*by_instance.get(int(index), ()), *words)
    return by_instance


def variables_set_by(local_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables and values that the MPI arguments ``-x NAME=VALUE`` and ``-x NAME`` set.

    For ``-x NAME``, the value of the variable is taken from ``environ``. If ``environ`` does not
    contain NAME, NAME is left out. If the arguments set a variable twice, the first value is used,
    as in Open MPI.
    """
    variables: dict[str, str] = {}
    for option, argument in pairwise(local_args):
        name, equals, value = argument.partition("=")
        if option in {"-x", "--x"} and (equals or name in environ):
            variables.setdefault(name, value if equals else environ[name])
    return variables


# --- the whole command ------------------------------------------------------------------------


def make_command(inputs: PlanInputs, variables: Sequence[Pairs]) -> tuple[tuple[str, ...], bool]:
    """Return the mpirun command that starts all instances, and whether it has only one part.

    An mpirun command has a part (an app context in Open MPI) for each instance, with the
    ``variables`` of the instance. If the mpirun command would be too long for the kernel, a compact
    command with one part for all instances is returned. A compact command sets only the variables
    that have the same value in all instances.

    Raises:
        UsageError: The command must be compact, but --instance-mpi-local-args is given, or the
            installed MPI does not accept a user name in a host list.
    """
    config, topology, environ = inputs.config, inputs.topology, inputs.environ
    is_mpich, num_instances = inputs.mpi.kind == MPICH, len(variables)
    mpi_arguments = split_mpi_arguments(config)[1]
    names = (*FORWARDED_VARIABLES, *sorted(THREAD_VARIABLES))
    forwarded = [name for name in names if name in environ]
    if topology.spans_hosts:
        forwarded += _TO_REMOTE
    program = (sys.executable, "-I", "-S", _WRAPPER, "--", *map(escape_colon, config.program))
    start = (_mpich if is_mpich else _open_mpi)(inputs, mpi_arguments.for_mpirun)

    def part(index: int, count: int, pairs: Pairs) -> list[str]:
        local = mpi_arguments.local(index)
        by_user = variables_set_by(local, environ)
        names = [name for name in forwarded if name not in by_user]
        words = ["-n" if is_mpich else "-np", str(count)]
        if not is_mpich and topology.spans_hosts and count < num_instances:
            # Without --host, Open MPI 5 would start all instances on the launcher's host.
            slots = topology.instances_per_host
            words += ["--host", f"{topology.hosts[index // slots].name}:{slots}"]
        given = [f"{name}={value}" for name, value in pairs if name != TARGET_OPTIONS]
        last = [f"{name}={value}" for name, value in pairs if name == TARGET_OPTIONS]
        for setting in (_x([*given, *names]), local, _x(last)):
            words += _for_mpich(setting) if is_mpich else setting
        return [*words, *program]

    words = list(start)
    for index, pairs in enumerate(variables):
        words += [":"] if index else []
        words += part(index, 1, pairs)
    if sum(len(word.encode(errors="surrogateescape")) + 9 for word in words) <= _MAX_BYTES:
        return tuple(words), False
    if len({mpi_arguments.local(index) for index in range(num_instances)}) > 1:
        raise UsageError(
            f"{config.named('instance_mpi_local_args')}: the mpirun command is too long with "
            f"separate arguments for each of {num_instances} instances; use --mpi-local-args, "
            "which sets the same arguments for all instances"
        )
    common = set(variables[0]).intersection(*variables)
    shared = tuple(pair for pair in variables[0] if pair in common)
    return (*start, *part(0, num_instances, shared)), True


def _x(variables: Iterable[str]) -> list[str]:
    """Return Open MPI's arguments that set (``NAME=VALUE``) or forward (``NAME``) variables."""
    return [word for variable in variables for word in ("-x", variable)]


def escape_colon(word: str) -> str:
    """Return a word of the program's command line in a form that mpirun passes on unchanged.

    mpirun takes the word ``:`` for a separator between two parts of the mpirun command. The word
    ``:`` is therefore replaced by ``%:``, and the word ``%:`` by ``%%:``. The wrapper of an
    instance restores the words ``:`` and ``%:`` before it starts the program.
    """
    return f"%{word}" if word.endswith(":") and not word[:-1].strip("%") else word


def split_command(command: Sequence[str]) -> list[tuple[str, ...]]:
    """Split an mpirun command into its parts at each word ``:``."""
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return [tuple(part) for part in parts]


def command_for_some(
    command: Sequence[str], hosts: Sequence[str], indices: Sequence[int]
) -> tuple[str, ...]:
    """Return the mpirun command that starts only some of the instances of an mpirun command.

    Args:
        command: The mpirun command, with a part for each instance.
        hosts: The host of each instance, as the command names it.
        indices: The instances to start.
    """
    parts = split_command(command)
    begin = next(at for at, word in enumerate(parts[0]) if word in ("-n", "-np"))
    words, parts[0] = list(parts[0][:begin]), parts[0][begin:]
    if words[-2] in ("-H", "-hosts"):
        counts = Counter(hosts[index] for index in indices)
        slots = Counter(hosts) if words[-2] == "-H" else counts
        words[-1] = ",".join(f"{host}:{slots[host]}" for host in counts)
    for number, index in enumerate(indices):
        words += [":"] if number else []
        words += parts[index]
    return tuple(words)


def network_of_mpirun(command: Sequence[str], network: str) -> str | None:
    """Return the network through which MPI's daemons connect to mpirun; None for any network.

    ``command`` is the mpirun command. ``network`` is the network between the hosts; empty if the
    network is not known.
    """
    for word, value in pairwise(command):
        if word in {"prte_if_include", "oob_tcp_if_include"}:
            return value if "," not in value else None
        if word == "-localhost":
            return network or None
    return None


def end_signal_of_mpirun(command: Sequence[str]) -> int:
    """Return the signal that makes mpirun end its instances, in place of SIGTERM.

    The launcher blocks SIGTERM for mpirun, because schedulers send SIGTERM to all processes of a
    job. mpirun of Open MPI ends its instances on SIGHUP. mpirun of MPICH does not catch SIGHUP, but
    ends its instances on SIGQUIT.
    """
    return signal.SIGHUP if "odls_base_sigkill_timeout" in command else signal.SIGQUIT


# --- Open MPI ---------------------------------------------------------------------------------


class _Names(NamedTuple):
    """The names of options and parameters that differ between Open MPI 5 and Open MPI 4."""

    daemon: str  # the mpirun option that sets a parameter of Open MPI's daemons
    shell: str  # the component that starts daemons through ssh
    host_file: str  # the parameter for the file with the host list
    network: str  # the parameter for the network of the daemons


_NAMES = {
    OPEN_MPI_5: _Names("--prtemca", "ssh", "prte_default_hostfile", "prte_if_include"),
    OPEN_MPI_4: _Names("--mca", "rsh", "orte_default_hostfile", "oob_tcp_if_include"),
}


def _open_mpi(inputs: PlanInputs, user: Sequence[str]) -> list[str]:
    """Return the start of an Open MPI command, with the user's --mpi-global-args before others."""
    topology = inputs.topology
    words = [inputs.mpi.path, *user]
    for setting in _settings(inputs, user):
        if not _is_set_by_user(user, setting):
            words += setting
    if topology.spans_hosts:
        slots = topology.instances_per_host
        words += ["-H", ",".join(f"{host.name}:{slots}" for host in topology.hosts)]
    return words


def _is_set_by_user(user: Sequence[str], setting: tuple[str, ...]) -> bool:
    """Tell whether the user's MPI arguments contain the same setting as ``setting``."""
    flag = setting[0].lstrip("-")
    spelled = [word.lstrip("-") for word in user]
    if flag in {"mca", "prtemca", "pmixmca"}:
        flags = {"mca", "prtemca", "pmixmca", "gmca"}
        return any(a in flags and b == setting[1] for a, b in pairwise(spelled))
    equivalents = {
        "map-by": {"map-by", "oversubscribe", "nooversubscribe", "npernode", "N"},
        "oversubscribe": {"map-by", "oversubscribe", "nooversubscribe"},
    }.get(flag, {flag})
    return any(word.partition("=")[0] in equivalents for word in spelled)


def _settings(inputs: PlanInputs, user: Sequence[str]) -> Iterator[tuple[str, ...]]:
    config, spans_hosts, probed = inputs.config, inputs.topology.spans_hosts, inputs.probed
    is_5 = inputs.mpi.kind == OPEN_MPI_5
    names = _NAMES[inputs.mpi.kind]
    yield ("--bind-to", "none")
    if not is_5:
        yield ("--oversubscribe",)
    if not spans_hosts:
        yield from _on_this_machine(names, inputs)
    if config.allow_run_as_root:
        yield ("--allow-run-as-root",)
    # If an instance ends with an error, MPI_Finalize must not wait for other instances.
    yield ("--mca", "async_mpi_finalize", "1")
    # The number of seconds after which mpirun kills instances that have not ended. The launcher
    # kills instances after the grace time, so mpirun waits two seconds longer. The mpirun of Open
    # MPI 4 sleeps for this number of seconds if an instance ends without MPI_Finalize, so Open MPI
    # 4 gets the number 1. Instances still have the full grace time, because wrappers wait for their
    # instances.
    limit = str(int(config.grace) + 2) if is_5 else "1"
    yield (names.daemon, "odls_base_sigkill_timeout", limit)
    if probed is not None:
        yield from _between_hosts(names, inputs.mpi.path, probed)
        if is_5:
            yield from _of_daemons(inputs.topology, probed)
    if config.mpi_fast_start and not (probed is not None and probed.has_fabric):
        # If Open MPI probes all of its transports, the start of a job takes 1.2 s longer. On hosts
        # without a faster network than TCP, the transports self, sm and tcp are sufficient.
        yield ("--mca", "pml", "ob1")
        yield ("--mca", "btl", "self,sm,tcp" if is_5 else "self,vader,tcp")
        if is_5:
            yield ("--mca", "osc", "^ucx")
    if not spans_hosts and not _is_set_by_user(user, ("--mca", "btl_tcp_if_exclude")):
        # If all instances run on one machine, the instances communicate through shared memory.
        # Without shared memory, and with MPI processes that the program starts, instances
        # communicate through TCP on the loopback interface.
        yield ("--mca", "btl_tcp_if_include", LOOPBACK)


def _on_this_machine(names: _Names, inputs: PlanInputs) -> Iterator[tuple[str, ...]]:
    """Yield the options that start all instances on this machine."""
    if inputs.mpi.kind == OPEN_MPI_5:
        # With OVERSUBSCRIBE, Open MPI starts more instances than this machine has slots. A job on
        # several hosts does not use OVERSUBSCRIBE, because Open MPI would start all instances on
        # the first host.
        yield ("--map-by", ":OVERSUBSCRIBE")
    if "SLURM_JOBID" in inputs.environ:
        yield (names.daemon, "plm", names.shell)
        yield (names.daemon, "ras", "^slurm")
    if any(name in inputs.environ for name in DEFAULT_HOST_FILES):
        yield (names.daemon, names.host_file, "none")


def _between_hosts(names: _Names, mpirun: str, probed: ProbedHosts) -> Iterator[tuple[str, ...]]:
    """Yield the options that start instances on other hosts and connect them.

    Open MPI must be installed in the same folder on every host of the job.
    """
    folder = Path(mpirun).parent
    # The option --prefix gives mpirun the installation folder of Open MPI on other hosts. If Open
    # MPI was installed from packages of the Linux distribution, --prefix is not needed.
    if folder.name == "bin" and folder.parent not in (Path("/usr"), Path("/")):
        yield ("--prefix", str(folder.parent))
    if probed.shell.agent:
        yield (names.daemon, f"plm_{names.shell}_agent", " ".join(probed.shell.agent))
        # mpirun itself starts the daemons on all hosts, so that only the launcher's machine needs
        # an ssh key.
        yield (names.daemon, f"plm_{names.shell}_no_tree_spawn", "1")
    if network := probed.network.mpi_name:
        yield ("--mca", "btl_tcp_if_include", network)
        if probed.network.includes_us:
            yield (names.daemon, names.network, network)
    # By default, Open MPI sends large messages over TCP with "put", and two hosts need 220 or 440
    # ms to exchange 25 MB at 1 Gbit/s. With "send", the exchange always takes 220 ms.
    yield ("--mca", "btl_tcp_flags", "send,inplace")
    # While an instance waits for a message, other instances on its core shall run.
    yield ("--mca", "mpi_yield_when_idle", "1")


def _of_daemons(topology: Topology, probed: ProbedHosts) -> Iterator[tuple[str, ...]]:
    """Yield the options for the daemons of Open MPI 5 on several hosts."""
    # With keep-alive settings, Open MPI's daemons detect the loss of a host within 30 seconds
    # instead of eight minutes.
    yield ("--prtemca", "oob_tcp_keepalive_time", "15")
    yield ("--prtemca", "oob_tcp_keepalive_intvl", "5")
    yield ("--prtemca", "oob_tcp_keepalive_probes", "3")
    if probed.shell.agent:
        # Inside a Slurm allocation, mpirun would by default start daemons with srun, not ssh.
        yield ("--prtemca", "plm", "ssh")
    else:
        # With --overlap, Slurm starts the daemons of Open MPI even while another job step of the
        # allocation is running.
        yield ("--prtemca", "plm_slurm_args", "--overlap")
    if probed.shell.agent or not any(host.is_local for host in topology.hosts):
        # If mpirun used Slurm's list of hosts, mpirun would start instances on the launcher's
        # machine, even if the launcher's machine is not a host of the job.
        yield ("--prtemca", "ras", "^slurm")


# --- MPICH ------------------------------------------------------------------------------------


def _mpich(inputs: PlanInputs, user: Sequence[str]) -> list[str]:
    topology = inputs.topology
    words = [inputs.mpi.path, *user]
    for host in topology.hosts:
        if host.user and not host.is_local:
            raise UsageError(
                f"host {host.user}@{host.name}: MPICH's mpirun does not accept a user name; give "
                "only the host name, and set User for the host in ~/.ssh/config"
            )
    if not topology.spans_hosts and "UCX_NET_DEVICES" not in user:
        words += ["-genv", "UCX_NET_DEVICES", LOOPBACK]
    given = {word.lstrip("-") for word in user}
    address = inputs.probed.network.own_address if inputs.probed is not None else _LOOPBACK_ADDRESS
    if address and given.isdisjoint({"localhost", "iface"}):
        # MPICH's proxies on the hosts connect to mpirun at the address of the option -localhost.
        # Without -localhost, the proxies resolve the name of the launcher's machine, and may get
        # another address.
        words += ["-localhost", address]
    if "bind-to" not in given:
        words += ["-bind-to", "none"]
    if topology.spans_hosts:
        slots = topology.instances_per_host
        words += ["-hosts", ",".join(f"{host.name}:{slots}" for host in topology.hosts)]
    return words


def _for_mpich(args: Sequence[str]) -> list[str]:
    """Translate Open MPI's ``-x NAME`` and ``-x NAME=VALUE`` in ``args`` to MPICH's options."""
    words: list[str] = []
    names: list[str] = []
    rest = iter(args)
    for word in rest:
        variable = next(rest, None) if word in {"-x", "--x"} else None
        if variable is None:
            words.append(word)
        elif "=" in variable:
            words += ["-env", *variable.split("=", 1)]
        else:
            names.append(variable)
    return [*words, *(["-envlist", ",".join(names)] if names else [])]
