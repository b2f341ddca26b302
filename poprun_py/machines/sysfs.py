"""Files of the Linux kernel under any root: CPU lists, numbers, and the limits of control groups.

Knows how the kernel writes things down; hardware_reader.py decides what they mean for a machine.
A missing or unreadable file gives None and no error: any of them is absent on some kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_MAX_CPU = 1 << 16
_NUMBER = re.compile(r"-?\d{1,15}", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+)/(\d+))?)?", re.ASCII)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the sorted numbers of a kernel list such as ``0-3,8`` or ``0-31:2/4``.

    Raises:
        ValueError: the text is no such list.
    """
    numbers: set[int] = set()
    for part in text.replace("\n", ",").split(","):
        word = part.strip(" \t\0")
        if not word:
            continue
        match = _RANGE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no number or range of a CPU list such as 0-3,8")
        first, last, used, group = match.groups()
        start, stop = int(first), int(last or first)
        if start > stop or stop >= _MAX_CPU or (group is not None and int(group) == 0):
            raise ValueError(f"{word!r} is no range of numbers below {_MAX_CPU}")
        if group is None:
            numbers.update(range(start, stop + 1))
        else:
            numbers.update(
                n for n in range(start, stop + 1) if (n - start) % int(group) < int(used)
            )
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: ``(0, 1, 2, 8)`` becomes ``0-2,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def whole_number(text: str) -> int | None:
    """Return the number that ``text`` is; None for what no kernel writes."""
    return int(text) if _NUMBER.fullmatch(text) else None


class KernelFiles:
    """Reads small files below ``root``; None where there is nothing to read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = str(root).rstrip("/")

    def text(self, path: str) -> str | None:
        """Return the stripped content of the file."""
        try:
            return Path(f"{self._prefix}/{path}").read_text("utf-8", "replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """Return the whole number in the file."""
        return whole_number(self.text(path) or "")

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        """Return the list in the file; a damaged list is as good as none."""
        text = self.text(path)
        try:
            return None if text is None else parse_cpu_list(text)
        except ValueError:
            return None

    def numbered(self, path: str, prefix: str) -> tuple[int, ...]:
        """Return the sorted N of the entries ``prefixN`` of a folder; none where it is missing."""
        try:
            names = [entry.name for entry in Path(f"{self._prefix}/{path}").iterdir()]
        except OSError:
            return ()
        tails = (n.removeprefix(prefix) for n in names if n.startswith(prefix))
        return tuple(sorted(int(t) for t in tails if t.isascii() and t.isdigit() and len(t) < 9))

    def status_list(self, field: str) -> tuple[int, ...] | None:
        """Return a list from ``proc/self/status``, such as ``Cpus_allowed_list``."""
        for line in (self.text("proc/self/status") or "").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                try:
                    return parse_cpu_list(value)
                except ValueError:
                    return None
        return None


class ControlGroups:
    """The limits that control groups, version 1 or 2, put on the reading process.

    A process lives in one group of each hierarchy, named by ``proc/self/cgroup``. In a container
    that name may lead outside of what is mounted, so every ancestor up to the mount point is read:
    the mount point is then the container's own group. A limit holds for all descendants.
    """

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        paths: dict[str, str] = {}
        for line in (files.text("proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for name in {controllers, *controllers.split(",")}:
                paths[name] = path
        self._paths = paths

    def _folders(self, mounts: tuple[str, ...], controller: str) -> list[str]:
        steps = [s for s in self._paths.get(controller, "/").split("/") if s not in ("", "..")]
        return [
            "/".join(["sys/fs/cgroup", *mount, *steps[:depth]])
            for mount in ([m] if m else [] for m in mounts)
            for depth in range(len(steps), -1, -1)
        ]

    def _version_2(self) -> list[str]:
        return self._folders(("", "unified"), "")

    def _version_1(self, controller: str) -> list[str]:
        named = [name for name in self._paths if controller in name.split(",")]
        mounts = dict.fromkeys([*named, controller, "cpu,cpuacct"] if controller == "cpu" else
                               [*named, controller])  # fmt: skip
        return self._folders(tuple(mounts), controller)

    def cpu_quota(self) -> float | None:
        """Return the tightest CPU quota in CPUs (2.5 is two and a half), or None for no limit.

        Source: Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst.
        """
        quotas = []
        for folder in self._version_2():
            words = (self._files.text(f"{folder}/cpu.max") or "").split()
            if len(words) == 2:
                quotas.append(_ratio(words[0], words[1]))
        for folder in self._version_1("cpu"):
            quota = self._files.text(f"{folder}/cpu.cfs_quota_us")
            if quota is not None:
                quotas.append(
                    _ratio(quota, self._files.text(f"{folder}/cpu.cfs_period_us") or "100000")
                )
        return min((quota for quota in quotas if quota is not None), default=None)

    def allowed(self, kind: str) -> list[tuple[int, ...]]:
        """Return every list of allowed ``cpus`` or ``mems`` that a cpuset states."""
        sources = (
            (self._version_2(), (f"cpuset.{kind}.effective", f"cpuset.{kind}")),
            (self._version_1("cpuset"), (f"cpuset.effective_{kind}", f"cpuset.{kind}")),
        )
        stated = []
        for folders, names in sources:
            for folder in folders:
                # The effective set may be smaller than the configured one.
                lists = (self._files.cpu_list(f"{folder}/{name}") for name in names)
                stated.append(next((numbers for numbers in lists if numbers), ()))
        return [numbers for numbers in stated if numbers]


def _ratio(quota: str, period: str) -> float | None:
    """Return quota over period; None for ``max``, ``-1`` and damaged values."""
    used, length = whole_number(quota) or 0, whole_number(period) or 0
    return used / length if used > 0 and length > 0 else None
