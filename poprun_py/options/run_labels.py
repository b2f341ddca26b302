"""The types of the options that name and describe a run: --run-name, --tag and --note."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from poprun_py.errors import UsageError
from poprun_py.options.option_types import OptionType

# The name of the symbolic link to the newest run, in the folder that contains all runs.
LATEST: Final = "latest"
_FOLDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Names that options such as --status understand as something other than the name of a run.
_RESERVED: Final = (LATEST, "newest")
# A suffix such as -2 must fit into the name of a folder as well.
_MOST_OF_NAME: Final = 120
_TAG: Final = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,63})=(.{0,256})", re.DOTALL)
_MOST_OF_NOTE: Final = 2_000
_HUGE: Final = 1 << 1024


def is_folder_name(name: str) -> bool:
    """Return whether a run's folder may have this name."""
    return _FOLDER_NAME.fullmatch(name) is not None and name != LATEST


def _is_run_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= _MOST_OF_NAME
        and is_folder_name(value)
        and value not in _RESERVED
        and not value.isdigit()  # --status takes a number for a process id
    )


def _is_tag(value: Any) -> bool:
    match = _TAG.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[2].isprintable()


def _is_note(value: Any) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= _MOST_OF_NOTE
        and all(c.isprintable() or c in "\n\t" for c in value)
    )


def labels_json(tags: Mapping[str, str], note: str | None) -> dict[str, Any]:
    """Return the tags and the note of a run as JSON values, without absent ones."""
    return {**({"tags": dict(tags)} if tags else {}), **({"note": note} if note else {})}


def label_lines(labels: Mapping[str, Any]) -> list[str]:
    """Return lines for people with the tags and the note in ``labels``, JSON values of a run."""
    tags, note = labels.get("tags"), labels.get("note")
    lines = []
    if isinstance(tags, Mapping) and tags:
        lines.append("tags: " + ", ".join(f"{key}={value}" for key, value in tags.items()))
    if isinstance(note, str) and note:
        lines += f"note: {note}".splitlines()
    return lines


def read_tags(texts: Iterable[str], option: str = "tag") -> dict[str, str]:
    """Return the tags in texts such as ``lr=0.1`` as a dictionary.

    Raises:
        UsageError: Two texts have the same key. The error message begins with ``option``.
    """
    tags: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in tags:
            raise UsageError(
                f"{option} {key} is given twice ({tags[key]!r} and {value!r}): give {key} once"
            )
        tags[key] = value
    return tags


def tag_texts(tags: Mapping[str, object], option: str) -> list[str]:
    """Return the tags in the table of a file as texts such as ``lr=0.1``.

    Raises:
        UsageError: A value is neither a text nor a number. The error message begins with
            ``option``.
    """
    for key, value in tags.items():
        # Python refuses to write integers of thousands of digits.
        is_number = type(value) is float or (type(value) is int and abs(value) < _HUGE)
        if not is_number and not isinstance(value, str):
            given = f"of type {type(value).__name__}"
            raise UsageError(
                f"{option}: the value of {key} is {given}: expected a text or a number"
            )
    return [f"{key}={value}" for key, value in tags.items()]


RUN_NAME: Final = OptionType(
    metavar="NAME",
    expected=(
        f"a name of at most {_MOST_OF_NAME} letters, digits, '.', '_' and '-', which begins with a "
        f"letter or digit, does not consist of digits only, and is not {' or '.join(_RESERVED)}"
    ),
    read=str,
    accepts=_is_run_name,
    keyword="str",
)
TAG: Final = OptionType(
    metavar="KEY=VALUE",
    expected=(
        "KEY=VALUE, such as lr=0.1, where KEY begins with a letter and consists of letters, "
        "digits, '.', '_' and '-', and VALUE has at most 256 printable characters"
    ),
    read=str,
    accepts=_is_tag,
    keyword="str",
)
NOTE: Final = OptionType(
    metavar="TEXT",
    expected=f"a text of at most {_MOST_OF_NOTE} characters, without control characters",
    read=str,
    accepts=_is_note,
    keyword="str",
)
