"""The hosts of a launch, from host lists, host files or Slurm; short forms of many host names.

Only ``with_names`` has side effects: it asks the resolver for the names of IPv6 addresses.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from popdist_py.errors import are, counted
from poprun_py.display.formatting import ranges_text
from poprun_py.errors import UsageError
from poprun_py.options.launch_config import LaunchConfig

# The maximum number of hosts in a host list, to detect typing errors such as a[0-999999999].
MAX_HOSTS = 65_536

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]*::?[0-9A-Fa-f:.]+")
_ADDRESS = re.compile(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(.*))?")
# This pattern splits a host name into the text before the last number, the last number, and the
# text after the last number. The pattern matches neither IPv4 addresses nor host names with ranges.
_LAST_NUMBER = re.compile(r"([A-Za-z_](?:[^\[]*[^\[0-9])?)([0-9]+)([^\[0-9]*)")
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Keys that Open MPI accepts after a host name in a host file. The parser converts a key to lower
# case, and its hyphens to underscores, before it looks up the key.
_SLOTS_KEYS = frozenset({"slots", "slot", "cpus", "cpu", "count"})
_MAX_SLOTS_KEYS = frozenset(
    f"{before}{key}{after}" for key in _SLOTS_KEYS for before, after in (("max_", ""), ("", "_max"))
)
_USER_KEYS = frozenset({"user", "username", "user_name"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host of a launch, with the name that the user gave.

    ``slots`` is the maximum number of instances on the host; None if not given. ``user`` is the
    user name for logging in to the host; if it is empty, ssh chooses the user name.
    """

    name: str
    slots: int | None = None
    user: str = ""
    is_local: bool = False


LOCALHOST = Host(name="localhost", is_local=True)


def parse_host_list(text: str, *, source: str) -> tuple[Host, ...]:
    """Parse a host list such as ``a,b[0-2,4]:2,me@[fd00::1]:2``.

    An entry is a host name (ranges allowed) or an IPv6 address, with optional slots and user.
    ``source`` is the name of the host list in error messages.

    Raises:
        UsageError: The host list has a blank, an empty or invalid entry, or the same host twice.
    """
    if any(c.isspace() for c in text):
        raise UsageError(
            f"{source} {text!r}: expected a list without blanks; separate hosts by commas only"
        )
    entries = (_parse_entry(entry, source) for entry in _split(text, source))
    return _unique(itertools.chain.from_iterable(entries), source)


def parse_host_file(text: str, *, source: str) -> tuple[Host, ...]:
    """Parse a host file, which has one entry in each line and ``#`` before comments.

    An entry of a host file may have ranges and slots: ``name[0-2]:N`` or ``name slots=N``. As in
    Open MPI's host files, ``cpu=N`` and ``count=N`` mean ``slots=N``, and ``user=NAME`` means
    ``NAME@`` before the host name. If several lines name the same host, the slots of these lines
    are added, and a line without slots counts as one slot.

    Raises:
        UsageError: The host file names no host, or a line of the host file is invalid.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{source}, line {number}"
        slots, user = _parse_settings(words[1:], where)
        for entry in _split(words[0], where):
            hosts += [
                replace(h, slots=h.slots if slots is None else slots, user=user or h.user)
                for h in _parse_entry(entry, where)
            ]
    if not hosts:
        raise UsageError(f"{source}: the file names no host; expected one host per line")
    return _unique(_merged(hosts, source), source)


def _parse_settings(words: Sequence[str], where: str) -> tuple[int | None, str]:
    """Return the slots (None if not given) and the user name of a line in a host file."""
    slots = max_slots = None
    user = ""
    for word in words:
        key, _, value = word.partition("=")
        key = key.lower().replace("-", "_")
        count = _slots(value)
        if key in _SLOTS_KEYS and count is not None:
            slots = count
        elif key in _MAX_SLOTS_KEYS and count is not None:
            max_slots = count
        elif key in _USER_KEYS and _USER.fullmatch(value):
            user = value
        else:
            raise UsageError(
                f"{where}: {word!r} is not accepted; expected slots=N, max_slots=N or user=NAME "
                "after the host name"
            )
    return max_slots if slots is None else slots, user


def _merged(hosts: Sequence[Host], source: str) -> list[Host]:
    """Merge all entries of the same host into one entry with the sum of the slots."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.setdefault(host.name.lower(), host)
        if before is host:
            continue
        if before.user != host.user:
            raise UsageError(
                f"{source}: host {host.name} is given with several users; give one user for this "
                "host"
            )
        slots = sum(1 if each.slots is None else each.slots for each in (before, host))
        found[host.name.lower()] = replace(before, slots=slots)
    return list(found.values())


def _split(text: str, source: str) -> list[str]:
    """Split a host list at the commas that are not inside brackets."""
    if set("[]") & set(_BRACKETS.sub("", text)):
        raise UsageError(
            f"{source} {text!r}: the brackets do not match; expected a range such as host[0-2,4]"
        )
    entries = re.sub(f"({_BRACKETS.pattern})|,", lambda match: match[1] or "\n", text).split("\n")
    if "" in entries:
        raise UsageError(
            f"{source} {text!r}: an entry is empty; expected names separated by one comma"
        )
    return entries


def _parse_entry(entry: str, source: str) -> list[Host]:
    """Return the hosts that one entry of a host list or host file describes."""
    user, at, entry = entry.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{source}: {user + at + entry!r}: expected user@host")
    address = _ADDRESS.fullmatch(entry)
    if address is not None:
        name, slots = address[1], address[2]
    elif entry.count(":") == 1:
        name, _, slots = entry.partition(":")
    else:
        # A host entry with several colons and no brackets is an IPv6 address without slots.
        name, slots = entry, None
    limit = _slots(slots) if slots is not None else None
    if slots is not None and not limit:
        raise UsageError(
            f"{source}: {entry!r}: expected name:slots, where slots is a whole number of at least 1"
        )
    if ":" in name:
        return [Host(name=_address(name, source), slots=limit, user=user)]
    hosts = [Host(name=expanded, slots=limit, user=user) for expanded in _expand(name, source)]
    for host in hosts:
        if not _NAME.fullmatch(host.name):
            raise UsageError(
                f"{source}: {host.name!r} is not a host name or address; expected letters, digits, "
                "dots and hyphens"
            )
    return hosts


def _address(text: str, source: str) -> str:
    """Return the canonical form of an IPv6 address."""
    # The import of ipaddress takes some milliseconds, and few host lists contain IPv6 addresses.
    from ipaddress import AddressValueError, IPv6Address

    try:
        return IPv6Address(text).compressed
    except AddressValueError:
        raise UsageError(
            f"{source}: {text!r} is not an IPv6 address; expected an address such as fd00::1, or "
            "[fd00::1]:2 for an address with 2 slots"
        ) from None


def _slots(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _expand(name: str, source: str) -> list[str]:
    """Return the host names in a range: ``n[08-09]`` stands for ``n08`` and ``n09``."""
    texts = _BRACKETS.split(name)
    ranges, count = [], 1
    for each in _BRACKETS.findall(name):
        ranges.append(_numbers(each[1:-1], name, source))
        count *= len(ranges[-1])
        if count > MAX_HOSTS:
            raise UsageError(f"{source}: {name!r}: expected at most {MAX_HOSTS} hosts")
    return [
        "".join(itertools.chain(*zip(texts, (*numbers, ""), strict=True)))
        for numbers in itertools.product(*ranges)
    ]


def _numbers(inside: str, name: str, source: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not match or int(last) < int(first) or len(first) > 9 or len(last) > 9:
            raise UsageError(
                f"{source}: {name!r}: the range {part!r} is not accepted; expected ascending "
                "numbers such as [0-2,4]"
            )
        if int(last) - int(first) + len(numbers) >= MAX_HOSTS:
            raise UsageError(f"{source}: {name!r}: expected at most {MAX_HOSTS} hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def compress(names: Sequence[str]) -> str:
    """Return the short form of host names: ``node0, node1, node3`` becomes ``node[0-1,3]``.

    Host names that differ only in their last number are combined; other names are unchanged.
    """
    split = {name: _LAST_NUMBER.fullmatch(name) for name in names}
    numbered = [match.groups() for match in split.values() if match]
    padded = {
        (head, len(digits), tail)
        for head, digits, tail in numbered
        if digits.startswith("0") and digits != "0"
    }
    groups: dict[tuple[str, int, str], list[int]] = {}
    for head, digits, tail in numbered:
        # If node08 is among the host names, node10 also counts as padded to two digits.
        width = len(digits) if (head, len(digits), tail) in padded else 0
        groups.setdefault((head, width, tail), []).append(int(digits))
    words = []
    for (head, width, tail), numbers in groups.items():
        parts = re.split(r"(\d+)", ranges_text(numbers))
        text = "".join(part.zfill(width) if part.isdigit() else part for part in parts)
        words.append(f"{head}{text}{tail}" if len(numbers) == 1 else f"{head}[{text}]{tail}")
    return ",".join([*words, *(name for name, match in split.items() if not match)])


def are_host_names(names: Sequence[str]) -> bool:
    """Return whether all names are valid host names or addresses, and no host is named twice."""
    return len({name.lower() for name in names}) == len(names) <= MAX_HOSTS and all(
        # A text with exactly one colon is not an address but a host with slots, such as name:2.
        _NAME.fullmatch(name) and name.count(":") != 1
        for name in names
    )


def _unique(hosts: Iterable[Host], source: str) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for host in hosts:
        # Host names are compared in lower case, because resolvers and ssh ignore letter case.
        if host.name.lower() in found:
            raise UsageError(
                f"{source}: host {host.name} is given twice; give the host once, with name:slots "
                "for several instances"
            )
        found[host.name.lower()] = host
        if len(found) > MAX_HOSTS:
            raise UsageError(f"{source}: expected at most {MAX_HOSTS} hosts")
    return tuple(found.values())


# --- the hosts of a launch ----------------------------------------------------------------------

# Environment variables with the path of a host file for Open MPI, as in a Kubernetes MPIJob.
DEFAULT_HOST_FILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_TASKS = re.compile(r"(\d{1,7})(?:\(x(\d{1,7})\))?")


def resolve_hosts(
    config: LaunchConfig,
    environ: Mapping[str, str],
    read_text: Callable[[str], str],
    local_names: frozenset[str] = frozenset(),
) -> tuple[Host, ...]:
    """Return the hosts of a launch, in the order in which the user or Slurm lists the hosts.

    ``--host`` takes precedence over ``--host-file``. Without ``--host`` and ``--host-file``, the
    hosts come from the Slurm allocation or the MPI host file that ``environ`` names. If the options
    and ``environ`` name no hosts, this machine is the only host. ``local_names`` are the names of
    this machine. ``read_text`` is a function that returns the text of a file.

    Raises:
        UsageError: A host list is malformed, a host is given twice, or the Slurm allocation has too
            few tasks.
    """
    if config.host is not None:
        hosts = parse_host_list(config.host, source=config.named("host"))
    elif config.host_file is not None:
        source = f"{config.named('host_file')} {config.host_file}"
        hosts = parse_host_file(read_text(config.host_file), source=source)
    elif environ.get("SLURM_JOB_NODELIST"):
        hosts = _slurm_hosts(environ, config.num_instances)
    elif default_file := next((environ[n] for n in DEFAULT_HOST_FILES if environ.get(n)), ""):
        hosts = parse_host_file(read_text(default_file), source=default_file)
    else:
        return (LOCALHOST,)
    local = _LOCAL_NAMES | {name.lower() for name in local_names}
    here = [h.name for h in hosts if h.name.lower() in local]
    if len(here) > 1:
        raise UsageError(
            f"hosts {here[0]} and {here[1]} are both this machine; give only one of the names, "
            "with name:slots for several instances"
        )
    return tuple(replace(h, is_local=h.name.lower() in local) for h in hosts)


def _slurm_hosts(environ: Mapping[str, str], num_instances: int) -> tuple[Host, ...]:
    """Return the hosts of a Slurm allocation.

    The number of slots of a host is the number of Slurm tasks that the user asked for on the host.
    If each node has one Slurm task with several CPUs, the number of slots is None (no limit): the
    task is meant for the launcher, and the instances divide the CPUs of the task.
    """
    hosts = parse_host_list(environ["SLURM_JOB_NODELIST"], source="SLURM_JOB_NODELIST")
    requested = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    if not requested or environ.get("SLURM_STEP_ID"):
        # If the user did not ask for tasks, Slurm's default of one task for each node is ignored.
        # In a Slurm step, Slurm's environment variables describe the step instead of the
        # allocation, and the only task of the step is the launcher.
        return hosts
    tasks = parse_tasks_per_node(
        environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE", ""), len(hosts)
    )
    if set(tasks) == {1} and environ.get("SLURM_CPUS_PER_TASK", "1") != "1":
        return hosts
    share, rest = divmod(num_instances, min(len(hosts), num_instances))
    lacking = [h.name for h, n in zip(hosts[:num_instances], tasks, strict=False) if n < share]
    if lacking and not rest:
        raise UsageError(
            f"Slurm allocated {counted(tasks[0], 'task')} to {lacking[0]}, but "
            f"{counted(share, 'instance')} {are(share)} planned on {lacking[0]} "
            f"({counted(num_instances, 'instance')} / "
            f"{counted(min(len(hosts), num_instances), 'node')}); give --ntasks-per-node={share} "
            f"to sbatch or salloc, or give --num-instances {sum(tasks)}"
        )
    return tuple(Host(name=h.name, slots=n) for h, n in zip(hosts, tasks, strict=True))


def slurm_tasks(
    hosts: Sequence[Host], instances_per_host: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return Slurm's environment variables with values that match the hosts of the plan.

    Open MPI starts one instance for each Slurm task that the environment variables count. Slurm's
    own values may count only one task for each node, and may name nodes that the plan does not use.
    """
    if not environ.get("SLURM_JOB_NODELIST"):
        return {}
    nodes, count = ",".join(host.name for host in hosts), str(len(hosts))
    return {
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NNODES": count,
        "SLURM_JOB_NUM_NODES": count,
        "SLURM_TASKS_PER_NODE": f"{instances_per_host}(x{count})",
    }


def parse_tasks_per_node(text: str, num_hosts: int) -> list[int]:
    """Return the number of tasks of each node from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        UsageError: The text is not in Slurm's short form, or does not describe ``num_hosts`` nodes.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[2] or 1) > MAX_HOSTS:
            tasks = []
            break
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) == 1:
        tasks *= num_hosts
    if len(tasks) != num_hosts:
        raise UsageError(
            f"SLURM_TASKS_PER_NODE {text!r}: expected the numbers of tasks of "
            f"{counted(num_hosts, 'node')}, such as 2(x3)"
        )
    return tasks


# --- names of IPv6 addresses --------------------------------------------------------------------


def with_names(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Replace each IPv6 address in ``hosts`` by a host name, because mpirun rejects IPv6 addresses.

    Raises:
        UsageError: The resolver knows no name for an IPv6 address, or two hosts have the same name.
    """
    named: list[Host] = []
    for host in hosts:
        name = _name_of_address(host) if ":" in host.name else host.name
        if any(name.lower() == each.name.lower() for each in named):
            raise UsageError(
                f"the name of host {host.name} is {name}, which is also given; give the host once"
            )
        named.append(replace(host, name=name))
    return tuple(named)


def _name_of_address(host: Host) -> str:
    if host.is_local:
        return socket.gethostname()
    try:
        return socket.getnameinfo((host.name, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        raise UsageError(
            f"no name of host {host.name} is known on this machine, and mpirun does not accept "
            f"IPv6 addresses; add a line such as '{host.name} node1' to /etc/hosts, or give a host "
            "name that resolves to the address"
        ) from None
