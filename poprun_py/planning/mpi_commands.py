"""The mpirun command line of a launch, and the user's MPI arguments in it.

The functions here only compute values. installed_mpi.py finds the installed ``mpirun``.
"""

from __future__ import annotations

import shlex
import signal
import sys
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
from poprun_py.planning.topology import Topology

if TYPE_CHECKING:
    from poprun_py.machines.host_checks import ProbedHosts

_LOOPBACK_ADDRESS = "127.0.0.1"
# The greatest length of an mpirun command in bytes. Linux accepts at most 2 MiB of arguments and
# environment together, and less if the size of the stack is limited.
_MAX_BYTES = 1_500_000
_WRAPPER = str(Path(__file__).parents[1] / "instance" / "start_wrapper.py")
# Variables that the wrapper of an instance needs to connect to the supervisor. The command
# line of mpirun contains only their names, because every user of a host can read command lines.
_TO_REMOTE = ("POPRUN_CONTROL", "POPRUN_TOKEN")

# --- the user's MPI arguments -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiArguments:
    """The words of --mpi-global-args, --mpi-local-args and --instance-mpi-local-args.

    ``of_instance`` maps the indices of instances to the words for these instances only.
    """

    for_mpirun: tuple[str, ...] = ()
    of_every_instance: tuple[str, ...] = ()
    of_instance: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def local(self, index: int) -> tuple[str, ...]:
        """Return the user's MPI arguments for one instance."""
        return (*self.of_every_instance, *self.of_instance.get(index, ()))

    def names_for_any(self, environ: Mapping[str, str]) -> frozenset[str]:
        """Return the names of all variables that MPI arguments set for at least one instance."""
        words = (self.of_every_instance, *self.of_instance.values())
        return frozenset(name for each in words for name in variables_set_by(each, environ))


def split_mpi_arguments(config: LaunchConfig) -> tuple[LaunchConfig, MpiArguments]:
    """Split the MPI arguments of ``config`` into words.

    The output of the instances does not pass through mpirun, so Open MPI's argument
    ``--output-filename DIR`` would not have an effect. The argument is removed from the returned
    options and words, and DIR becomes the value of ``--output-dir`` if that option is not given.

    Raises:
        UsageError: A quotation mark is missing, or an argument is for an instance that does not
            exist.
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
        UsageError: A quotation mark is missing in the value of the option ``option``.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{option} {text!r}: {str(error).lower()}; expected arguments quoted as in a shell"
        ) from None


def _without_output_filename(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a pair of the words without ``--output-filename FOLDER`` and the last FOLDER."""
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
                f"{option} {entry!r}: expected an index from 0 to {config.num_instances - 1}"
            )
        words = split_args(text, option)
        by_instance[int(index)] = (*by_instance.get(int(index), ()), *words)
    return by_instance


def variables_set_by(local_args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``-x NAME=VALUE`` and ``-x NAME`` arguments set, with their values.

    For ``-x NAME``, the value is that of NAME in ``environ``. A NAME that is not set in ``environ``
    is left out. If a variable is given twice, its first value counts, as in Open MPI.
    """
    variables: dict[str, str] = {}
    for option, argument in pairwise(local_args):
        name, equals, value = argument.partition("=")
        if option in {"-x", "--x"} and (equals or name in environ):
            variables.setdefault(name, value if equals else environ[name])
    return variables


# --- the whole command ------------------------------------------------------------------------


def make_command(inputs: PlanInputs, variables: Sequence[Pairs]) -> tuple[tuple[str, ...], bool]:
    """Return the command that starts every instance, and whether the command is compact.

    The command has a part for each instance (Open MPI calls it an app context) with the
    ``variables`` of the instance. A compact command has one part for all instances, because parts
    for each instance would be too long for the kernel. The part sets only the variables that have
    the same value in every instance.

    Raises:
        UsageError: The command must be compact, but instances have MPI arguments of their own, or
            the installed MPI does not accept the user of a host.
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
            # Without --host, Open MPI 5 starts every part of the command on the launcher's host.
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
            f"{config.named('instance_mpi_local_args')}: the command is too long with a part for "
            f"each of {num_instances} instances; use --mpi-local-args"
        )
    common = set(variables[0]).intersection(*variables)
    shared = tuple(pair for pair in variables[0] if pair in common)
    return (*start, *part(0, num_instances, shared)), True


def _x(variables: Iterable[str]) -> list[str]:
    """Return Open MPI's arguments that set (``NAME=VALUE``) or forward (``NAME``) variables."""
    return [word for variable in variables for word in ("-x", variable)]


def escape_colon(word: str) -> str:
    """Return a word of the program's command line in a form that mpirun does not interpret.

    mpirun reads the word ``:`` as the separator between two parts of its command. The word ``:`` is
    therefore replaced by ``%:``, and the word ``%:`` by ``%%:``. The wrapper of each instance
    restores the words before it starts the program.
    """
    return f"%{word}" if word.endswith(":") and not word[:-1].strip("%") else word


def split_command(command: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the parts of an mpirun command, which the word ``:`` separates."""
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
    job. MPICH does not catch Open MPI's signal, SIGHUP.
    """
    return signal.SIGHUP if "odls_base_sigkill_timeout" in command else signal.SIGQUIT


# --- Open MPI ---------------------------------------------------------------------------------


class _Names(NamedTuple):
    """The names that differ between Open MPI 5 and Open MPI 4."""

    daemon: str  # mpirun's option that sets a parameter of Open MPI's daemons
    shell: str  # the component that starts daemons through a remote shell
    host_file: str  # the parameter that names a file with the hosts
    network: str  # the parameter that sets the network of the daemons


_NAMES = {
    OPEN_MPI_5: _Names("--prtemca", "ssh", "prte_default_hostfile", "prte_if_include"),
    OPEN_MPI_4: _Names("--mca", "rsh", "orte_default_hostfile", "oob_tcp_if_include"),
}


def _open_mpi(inputs: PlanInputs, user: Sequence[str]) -> list[str]:
    """Return the words before the parts, with the user's global arguments first, as in PopRun."""
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
    """Tell whether the user's MPI arguments contain a setting, so that the user's value counts."""
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
    # An instance that ends with an error must not wait for other instances in MPI_Finalize.
    yield ("--mca", "async_mpi_finalize", "1")
    # The number of seconds after which mpirun kills instances that have not ended. The launcher
    # itself kills instances after the grace time, so mpirun waits two seconds longer. The mpirun of
    # Open MPI 4 sleeps for this time when an instance ends without MPI_Finalize. There, a short
    # time does not shorten the grace time, because the wrapper runs until its instance has ended.
    limit = str(int(config.grace) + 2) if is_5 else "1"
    yield (names.daemon, "odls_base_sigkill_timeout", limit)
    if probed is not None:
        yield from _between_hosts(names, inputs.mpi.path, probed)
        if is_5:
            yield from _of_daemons(inputs.topology, probed)
    if config.mpi_fast_start and not (probed is not None and probed.has_fabric):
        # If Open MPI probes all of its transports, the start takes 1.2 s longer. The transports
        # self, sm and tcp are sufficient for hosts without a faster network than TCP.
        yield ("--mca", "pml", "ob1")
        yield ("--mca", "btl", "self,sm,tcp" if is_5 else "self,vader,tcp")
        if is_5:
            yield ("--mca", "osc", "^ucx")
    if not spans_hosts and not _is_set_by_user(user, ("--mca", "btl_tcp_if_exclude")):
        # On one machine, instances communicate through shared memory. Instances use TCP only if
        # shared memory is not available, or to communicate with MPI processes that the program
        # itself starts. TCP on the loopback interface is sufficient for both cases.
        yield ("--mca", "btl_tcp_if_include", LOOPBACK)


def _on_this_machine(names: _Names, inputs: PlanInputs) -> Iterator[tuple[str, ...]]:
    """Yield the options that start all instances on this machine."""
    if inputs.mpi.kind == OPEN_MPI_5:
        # OVERSUBSCRIBE lets Open MPI start more instances than this machine has slots, because the
        # plan decides where instances run. On several hosts, -H gives each host enough slots, and
        # with OVERSUBSCRIBE, all instances would start on the first host.
        yield ("--map-by", ":OVERSUBSCRIBE")
    if "SLURM_JOBID" in inputs.environ:
        yield (names.daemon, "plm", names.shell)
        yield (names.daemon, "ras", "^slurm")
    if any(name in inputs.environ for name in DEFAULT_HOST_FILES):
        yield (names.daemon, names.host_file, "none")


def _between_hosts(names: _Names, mpirun: str, probed: ProbedHosts) -> Iterator[tuple[str, ...]]:
    """Yield the options that start instances on other hosts and connect them.

    Open MPI must be installed in the same folder on every host.
    """
    folder = Path(mpirun).parent
    # --prefix names the installation folder of Open MPI on other hosts. If Open MPI comes
    # from the system's packages, its files are not in one folder, and --prefix is not needed.
    if folder.name == "bin" and folder.parent not in (Path("/usr"), Path("/")):
        yield ("--prefix", str(folder.parent))
    if probed.shell.agent:
        yield (names.daemon, f"plm_{names.shell}_agent", " ".join(probed.shell.agent))
        # The launcher's machine starts the daemons on all hosts, so that only this machine
        # needs an ssh key.
        yield (names.daemon, f"plm_{names.shell}_no_tree_spawn", "1")
    if network := probed.network.mpi_name:
        yield ("--mca", "btl_tcp_if_include", network)
        if probed.network.includes_us:
            yield (names.daemon, names.network, network)
    # By default, Open MPI uses "put" for large messages over TCP. With "put", requests in one
    # direction wait behind the data in the other direction: exchanging 25 MB at 1 Gbit/s took
    # either 220 or 440 ms. With "send", the exchange always takes 220 ms.
    yield ("--mca", "btl_tcp_flags", "send,inplace")
    # Instances that wait for a message shall yield their core to instances that compute on it.
    yield ("--mca", "mpi_yield_when_idle", "1")


def _of_daemons(topology: Topology, probed: ProbedHosts) -> Iterator[tuple[str, ...]]:
    """Yield the options for the daemons of Open MPI 5 on several hosts."""
    # With the keep-alive settings, Open MPI's daemons notice the loss of a host within 30
    # seconds instead of eight minutes. The launcher itself notices the loss even earlier, and
    # reports the loss in a clearer message.
    yield ("--prtemca", "oob_tcp_keepalive_time", "15")
    yield ("--prtemca", "oob_tcp_keepalive_intvl", "5")
    yield ("--prtemca", "oob_tcp_keepalive_probes", "3")
    if probed.shell.agent:
        # Inside a Slurm allocation, these settings make mpirun use ssh instead of srun, and the
        # hosts of its command line instead of Slurm's list of tasks.
        yield ("--prtemca", "plm", "ssh")
    else:
        # With --overlap, Slurm starts this job step even while another step of the allocation
        # is running.
        yield ("--prtemca", "plm_slurm_args", "--overlap")
    if probed.shell.agent or not any(host.is_local for host in topology.hosts):
        # If mpirun read Slurm's list of hosts, it would start instances on the launcher's
        # machine, even if this machine is not one of the job's hosts.
        yield ("--prtemca", "ras", "^slurm")


# --- MPICH ------------------------------------------------------------------------------------


def _mpich(inputs: PlanInputs, user: Sequence[str]) -> list[str]:
    topology = inputs.topology
    words = [inputs.mpi.path, *user]
    for host in topology.hosts:
        if host.user and not host.is_local:
            raise UsageError(
                f"host {host.user}@{host.name}: MPICH's mpirun does not accept a user; expected "
                "only the name of the host, and its User in ~/.ssh/config"
            )
    if not topology.spans_hosts and "UCX_NET_DEVICES" not in user:
        words += ["-genv", "UCX_NET_DEVICES", LOOPBACK]
    given = {word.lstrip("-") for word in user}
    address = inputs.probed.network.own_address if inputs.probed is not None else _LOOPBACK_ADDRESS
    if address and given.isdisjoint({"localhost", "iface"}):
        # MPICH's proxies on the hosts connect to mpirun at the address that -localhost gives.
        # Without -localhost, the proxies resolve the name of the launcher's machine, which may give
        # a different address.
        words += ["-localhost", address]
    if "bind-to" not in given:
        words += ["-bind-to", "none"]
    if topology.spans_hosts:
        slots = topology.instances_per_host
        words += ["-hosts", ",".join(f"{host.name}:{slots}" for host in topology.hosts)]
    return words


def _for_mpich(args: Sequence[str]) -> list[str]:
    """Translate Open MPI's ``-x NAME`` and ``-x NAME=VALUE`` for MPICH; keep other arguments."""
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
