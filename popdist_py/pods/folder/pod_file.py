"""Functions that read and write ``pod.toml``, the description of a pod."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from popdist_py.pods.model.json_values import from_json
from popdist_py.pods.model.pod_errors import DamagedError, PodError
from popdist_py.pods.model.pod_parts import Pod
from popdist_py.pods.model.pod_rules import check_pod


def format_pod(pod: Pod) -> str:
    """Return the text of ``pod.toml`` for a pod."""
    lines = [
        "# A pod of emulated IPUs, whose agents are IPU-Machines. Changes take effect when the pod",
        "# has no partitions. Changes of create_seconds and reset_seconds take effect immediately.",
        *_entries(pod, ("name", "create_seconds", "reset_seconds")),
    ]
    for table, parts in (
        ("agents", pod.agents),
        ("clusters", pod.clusters),
        ("allocations", pod.allocations),
    ):
        for part in parts:
            lines += ["", f"[[{table}]]", *_entries(part, [f.name for f in fields(part)])]
    return "\n".join(lines) + "\n"


def _entries(value: Any, names: Sequence[str]) -> list[str]:
    return [f"{name} = {_toml(getattr(value, name))}" for name in names]


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # A checked pod contains only strings, numbers and booleans that JSON and TOML write in the same
    # way.
    return json.dumps(value, ensure_ascii=False)


def read_pod(file: Path) -> Pod:
    """Return the pod that a ``pod.toml`` file describes.

    Raises:
        DamagedError: The file does not describe a pod. The message names the wrong entry.
        PodError: The file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DamagedError(f"{file} is not UTF-8 text: save the file in UTF-8") from None
    except OSError as error:
        raise PodError(f"the pod's description {file} cannot be read: {error.strerror}") from None
    return parse_pod(text, str(file))


def parse_pod(text: str, source: str) -> Pod:
    """Return the pod that the text of a ``pod.toml`` describes.

    ``source`` is the name of the file for error messages.

    Raises:
        DamagedError: The text is not TOML, or does not describe a pod.
    """
    # tomllib is imported here, because a launch without a pod does not need it.
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DamagedError(f"{source} is not valid TOML: {error}") from None
    return pod_of(document, source)


def pod_of(document: dict[str, Any], source: str) -> Pod:
    """Return the pod that a parsed ``pod.toml`` describes.

    Raises:
        DamagedError: The document does not describe a pod.
    """
    tables: dict[str, Any] = {"agents": [], "clusters": [], "allocations": []}
    try:
        pod: Pod = from_json(Pod, {**tables, **document}, "pod")
        check_pod(pod)
    except PodError as error:
        raise DamagedError(f"{source}: {error}") from None
    return pod
