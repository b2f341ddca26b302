"""The signature of a collective call, which the instances compare before they exchange data.

Pure values: nothing here communicates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.errors import CollectiveMismatchError, counted, plural

__all__ = ["INSTANCES", "Names", "Signature", "misfit", "mismatch"]

# Of a model's weights, hundreds may differ for one reason.
_MAX_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class Signature:
    """One collective call, equal on all instances.

    Attributes:
        call: the collective, for example ``all_reduce``.
        detail: its operation or root.
        dtype: name of the element type; empty where no array takes part.
        shape: shape of the array.
        name: the user's name of the call, or empty.
        leaves: path and kind of every leaf of a container, in the order in which they travel.
    """

    call: str
    detail: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    name: str = ""
    leaves: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> int:
        """A number of 63 bits, above 0, equal in all processes for equal signatures."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 1) or 1

    def __str__(self) -> str:
        arguments = [f"name={self.name!r}"] if self.name else []
        arguments += [self.detail] if self.detail else []
        arguments += [f"shape={self.shape}", f"dtype={self.dtype}"] if self.dtype else []
        return f"{self.call}({', '.join(arguments)})"

    @property
    def description(self) -> str:
        """What ``mismatch`` compares: the call in words, then a line for each leaf."""
        lines = (f"{path}\t{kind}".replace("\n", " ") for path, kind in self.leaves)
        return "\n".join((str(self), *lines))


@dataclass(frozen=True)
class Names:
    """How messages call those that communicate.

    Attributes:
        noun: what one of them is, "instance" or "rank".
        numbers: by which the user knows each of them; None: its index.
        time_limit: what sets how long a wait may last.
        shows_index: whether messages also state the index, where it differs from the number.
    """

    noun: str = "instance"
    numbers: tuple[int, ...] | None = None
    time_limit: str = "POPDIST_HANG_TIMEOUT"
    shows_index: bool = True

    def of(self, *indices: int) -> str:
        """Return the names of these members, such as "ranks 4 (1 of the group), 5"."""
        return f"{plural(self.noun, len(indices))} {', '.join(map(self._number, indices))}"

    def _number(self, index: int) -> str:
        number = index if self.numbers is None else self.numbers[index]
        if number == index or not self.shows_index:
            return str(number)
        return f"{number} ({index} of the group)"


INSTANCES = Names()


def mismatch(
    descriptions: Sequence[str], instances: Sequence[int], names: Names = INSTANCES
) -> CollectiveMismatchError:
    """Return the error for the calls with these ``descriptions``, which differ.

    Args:
        descriptions: of every instance's call.
        instances: index of each among those that communicate.
        names: of those.
    """
    calls, leaves = [], []
    for description in descriptions:
        call, *lines = description.split("\n")
        calls.append(call)
        leaves.append(dict(line.split("\t", 1) for line in lines if "\t" in line))
    if len(set(calls)) == 1 and any(other != leaves[0] for other in leaves):
        text = f"{calls[0]}: the {names.noun}s differ in {_differences(leaves, instances, names)}"
    else:
        callers = _by_value(calls, instances, names)
        text = "; ".join(f"{who} called {call}" for call, who in callers.items())
    return CollectiveMismatchError(f"{text}: all {names.noun}s must make the same call")


def misfit(
    call: object, names: Names, sender: int, sent: int, receiver: int, expected: int
) -> CollectiveMismatchError:
    """Return the error for a block of other bytes than the place for it.

    Args:
        call: the collective call, as messages name it.
        names: of the instances.
        sender: index of the instance that sends the block.
        sent: bytes of the block.
        receiver: index of the instance that receives it.
        expected: bytes of the place.
    """
    return CollectiveMismatchError(
        f"{call}: {names.of(sender)} sends {counted(sent, 'byte')} to {names.of(receiver)}, "
        "which expects "
        f"{expected}"
    )


def _differences(leaves: Sequence[dict[str, str]], instances: Sequence[int], names: Names) -> str:
    """Say which leaves differ, and where: the first few."""
    paths = dict.fromkeys(path for of_instance in leaves for path in of_instance)
    parts = []
    for path in paths:
        found = [of_instance.get(path, "missing") for of_instance in leaves]
        kinds = _by_value(found, instances, names)
        if len(kinds) > 1:
            parts.append(f"{path} ({'; '.join(f'{who}: {kind}' for kind, who in kinds.items())})")
    hidden = len(parts) - _MAX_DIFFERENCES
    return ", ".join(parts[:_MAX_DIFFERENCES]) + (f", and {hidden} more" if hidden > 0 else "")


def _by_value(values: Sequence[str], instances: Sequence[int], names: Names) -> dict[str, str]:
    """Return each different value with the instances that have it, in words."""
    found: dict[str, list[int]] = {}
    for value, instance in zip(values, instances, strict=True):
        found.setdefault(value, []).append(instance)
    return {value: names.of(*indices) for value, indices in found.items()}
