"""The grammar of host lists and host files, and the short form of many host names.

host_allocation.py decides which list or file is used, and reads the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from poprun_py.errors import UsageError

# The maximum number of hosts in a host list. Larger numbers are typing errors, such as
# a[0-999999999].
MAX_HOSTS = 65_536

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]*::?[0-9A-Fa-f:.]+")
_ADDRESS = re.compile(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\](?::(.*))?")
# This pattern splits a host name into the text before its last number, that number, and the text
# after it. The pattern does not match IPv4 addresses.
_LAST_NUMBER = re.compile(r"([A-Za-z_](?:.*[^0-9])?)([0-9]+)([^0-9]*)")
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

    A host list may contain ranges (zero padding is kept), IPv6 addresses, slots and users.
    ``source`` is the name of the list in messages.

    Raises:
        UsageError: An entry is empty, the list contains a blank, a range or name is invalid, or a
            host is given twice.
    """
    if any(c.isspace() for c in text):
        raise UsageError(
            f"{source} {text!r}: expected no blanks inside the list; separate hosts by commas only"
        )
    return _unique(
        [host for entry in _split(text, source) for host in _parse_entry(entry, source)], source
    )


def parse_host_file(text: str, *, source: str) -> tuple[Host, ...]:
    """Parse a host file, which has one entry in each line and ``#`` before comments.

    An entry may have ranges and slots: ``name[0-2]:N`` or ``name slots=N``. As in Open MPI's host
    files, ``cpu=N`` and ``count=N`` mean ``slots=N``, and ``user=NAME`` means ``NAME@``. If several
    lines name the same host, their slots are added, and a line without slots counts as one slot.

    Raises:
        UsageError: The file names no host, or a line is invalid.
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
        raise UsageError(f"{source}: no host in the file; expected one host a line")
    return _unique(_merged(hosts, source), source)


def _parse_settings(words: Sequence[str], where: str) -> tuple[int | None, str]:
    """Return the slots and the user name from the words after a host name in a host file.

    The slots are None if no word gives them; the user name is empty if no word gives it.
    """
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
                f"{where}: {word!r}: expected slots=N, max_slots=N or user=NAME after the host name"
            )
    return max_slots if slots is None else slots, user


def _merged(hosts: Sequence[Host], source: str) -> list[Host]:
    """Merge all entries of the same host into one entry with the sum of their slots."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.setdefault(host.name.lower(), host)
        if before is host:
            continue
        if before.user != host.user:
            raise UsageError(f"{source}: host {host.name} is given with several users; name one")
        slots = sum(1 if each.slots is None else each.slots for each in (before, host))
        found[host.name.lower()] = replace(before, slots=slots)
    return list(found.values())


def _split(text: str, source: str) -> list[str]:
    """Split a host list at the commas that are not inside brackets."""
    entries, start, depth = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if not 0 <= depth <= 1:
            break
        if character == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    entries.append(text[start:])
    if depth:
        raise UsageError(f"{source} {text!r}: brackets do not match; expected host[0-2,4]")
    if "" in entries:
        raise UsageError(f"{source} {text!r}: empty entry; expected names separated by one comma")
    return entries


def _parse_entry(entry: str, source: str) -> list[Host]:
    """Return the hosts of one entry, which is a name with optional ranges, user and slots."""
    user, at, entry = entry.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{source}: {user + at + entry!r}: expected user@host")
    address = _ADDRESS.fullmatch(entry)
    if address is not None:
        name, slots = address[1], address[2]
    elif entry.count(":") == 1:
        name, _, slots = entry.partition(":")
    else:
        # With more than one colon and no brackets, the entry is an IPv6 address without slots.
        name, slots = entry, None
    limit = _slots(slots) if slots is not None else None
    if slots is not None and not limit:
        raise UsageError(
            f"{source}: {entry!r}: expected name:slots with a whole number of at least 1"
        )
    if ":" in name:
        return [Host(name=_address(name, source), slots=limit, user=user)]
    hosts = [Host(name=expanded, slots=limit, user=user) for expanded in expand(name, source)]
    for host in hosts:
        if not _NAME.fullmatch(host.name):
            raise UsageError(
                f"{source}: {host.name!r} is not a host name or address; expected letters, digits, "
                "points and hyphens"
            )
    return hosts


def _address(text: str, source: str) -> str:
    """Return the canonical form of an IPv6 address."""
    # ipaddress takes some milliseconds to import, and few lists contain IPv6 addresses.
    from ipaddress import AddressValueError, IPv6Address

    try:
        return IPv6Address(text).compressed
    except AddressValueError:
        raise UsageError(
            f"{source}: {text!r} is not an IPv6 address; expected one such as fd00::1, with slots "
            "as [fd00::1]:2"
        ) from None


def _slots(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def expand(name: str, source: str) -> list[str]:
    """Return all names that a name with ranges stands for: ``n[08-09]`` is ``n08`` and ``n09``.

    Raises:
        UsageError: A range is invalid, or there are more than 65,536 names.
    """
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, closing, tail = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(",") if closing else [""]:
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not match or int(last) < int(first) or len(first) > 9 or len(last) > 9:
            raise UsageError(
                f"{source}: {name!r}: bad range {part!r}; expected ascending numbers such as "
                "[0-2,4]"
            )
        if int(last) - int(first) >= MAX_HOSTS:
            raise UsageError(f"{source}: {name!r}: more than {MAX_HOSTS} hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    tails = expand(tail, source)
    if len(numbers) * len(tails) > MAX_HOSTS:
        raise UsageError(f"{source}: {name!r}: more than {MAX_HOSTS} hosts")
    return [head + number + end for number in numbers for end in tails]


def compress(names: Sequence[str]) -> str:
    """Return the short form of many names: ``node0, node1, node3`` becomes ``node[0-1,3]``.

    Names that differ only in their last number are combined; all other names are kept unchanged.
    """
    groups: dict[tuple[str, str, int], list[int]] = {}
    plain: list[str] = []
    numbered: list[tuple[str, str, str]] = []
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is None or "[" in name:
            plain.append(name)
            continue
        head, digits, tail = match.groups()
        numbered.append((head, tail, digits))
    padded = {
        (head, tail, len(digits))
        for head, tail, digits in numbered
        if digits.startswith("0") and digits != "0"
    }
    for head, tail, digits in numbered:
        # If node08 is among the names, node10 also counts as padded with zeros to two digits.
        width = len(digits) if (head, tail, len(digits)) in padded else 0
        groups.setdefault((head, tail, width), []).append(int(digits))
    words = []
    for (head, tail, width), numbers in groups.items():
        runs = _runs(sorted(set(numbers)))
        text = ",".join(
            f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs
        )
        words.append(f"{head}{text}{tail}" if len(numbers) == 1 else f"{head}[{text}]{tail}")
    return ",".join([*words, *plain])


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return each range of consecutive numbers as a pair of its first and its last number."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def are_host_names(names: Sequence[str]) -> bool:
    """Return whether all names are valid host names or addresses, and no host is named twice."""
    return len({name.lower() for name in names}) == len(names) <= MAX_HOSTS and all(
        # An entry with exactly one colon has slots, as in name:2. An IPv6 address has more colons.
        _NAME.fullmatch(name) and name.count(":") != 1
        for name in names
    )


def _unique(hosts: list[Host], source: str) -> tuple[Host, ...]:
    seen: set[str] = set()
    for host in hosts:
        # Names are compared in lower case, because resolvers and ssh ignore the letter case of a
        # host name.
        if host.name.lower() in seen:
            raise UsageError(
                f"{source}: host {host.name} is given twice; name it once, with name:slots for "
                "several instances"
            )
        seen.add(host.name.lower())
    if len(hosts) > MAX_HOSTS:
        raise UsageError(f"{source}: more than {MAX_HOSTS} hosts")
    return tuple(hosts)
