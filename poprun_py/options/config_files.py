"""Reading and writing of configuration files (.toml or .json), and reading of pyproject.toml.

The keys in a configuration file are the field names of LaunchConfig, with hyphens or underscores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from poprun_py.display.formatting import read_json
from poprun_py.errors import UsageError, nearest
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.option_origins import Origin, Source
from poprun_py.options.option_types import option_name
from poprun_py.options.run_labels import tag_texts

_PROJECT_TABLE = "poprun-py"
# Loading the TOML parser takes longer than all other work before a launch, so pyproject.toml is
# parsed only if this pattern finds the table of poprun-py in the file.
_NAMES_OUR_TABLE = re.compile(r"""poprun[-_]py["']?\s*[].=]""")
# --export-config writes the sources of the values under this key, which --import-config ignores.
_SOURCES = "sources"
# The suffixes of the names of configuration files.
SUFFIXES: Final = (".toml", ".json")


def checked_values(data: Any, path: str, text: str = "") -> Source:
    """Return the option values in a table from a file, with the origins of the values.

    Args:
        data: The table of options, as it was parsed from a file.
        path: The name of the file, which error messages show.
        text: The text of the file, for line numbers in messages; if it is empty, messages have no
            line numbers.

    Raises:
        UsageError: ``data`` is not a table, or contains an unknown key or an invalid value.
    """
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: got a value of type {type(data).__name__}: expected a table of options, "
            "such as num-replicas = 8"
        )
    values: Source = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        place, in_file = path + _line_of(key, text), Origin(path, key, " = ", f" in {path}")
        if name == _SOURCES and isinstance(value, dict):
            continue
        if name == "program":
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise UsageError(
                    f"{place}: program is {value!r}: expected a list of texts, such as "
                    '["train.py", "--lr", "0.1"]'
                )
            values[name] = tuple(value), in_file
            continue
        _require_known(key, place)
        if name in values:
            raise UsageError(
                f"{place}: {key!r} is given twice, with hyphens and with underscores: remove one"
            )
        if name == "tag" and isinstance(value, dict):
            value = tag_texts(value, f"{place}: {key}")
        if value is not None:
            values[name] = OPTIONS[name].check_or_read(f"{place}: {key}", value), in_file
    return values


def _require_known(key: str, place: str) -> None:
    name = key.replace("-", "_")
    if name not in OPTIONS:
        from poprun_py.options.other_launchers import foreign_hint

        known = [option for option, declared in OPTIONS.items() if declared.saved]
        # The message suggests a similar key, with hyphens or underscores as in the unknown key.
        known = known if "_" in key else [option.replace("_", "-") for option in known]
        hint = (
            foreign_hint(option_name(key))
            or nearest(key, known)
            or "; poprun-py --help all lists all options"
        )
        raise UsageError(f"{place}: unknown option {key!r}{hint}")
    if not OPTIONS[name].saved:
        raise UsageError(
            f"{place}: {key!r} cannot be set in a configuration file; give {option_name(name)} on "
            "the command line"
        )


def _line_of(key: str, text: str) -> str:
    """Return ``, line N`` for the line that gives ``key`` a value; empty if no line is found."""
    found = re.search(rf"""^[ \t{{,]*["']?{re.escape(key)}["']?[ \t]*[=:]""", text, re.M)
    return f", line {text.count(chr(10), 0, found.end()) + 1}" if found else ""


def parse_config(text: str, path: str) -> Source:
    """Return the option values in the text of a configuration file, with their origins.

    Raises:
        UsageError: The suffix of the file's name is unknown, or the text of the file is not valid.
    """
    if path.endswith(".json"):
        try:
            data = read_json(text)
        except ValueError as error:
            raise UsageError(f"{path}: the file is not valid JSON ({error})") from None
    elif path.endswith(".toml"):
        data = _parsed_toml(text, path)
    else:
        raise _unknown_suffix(path)
    return checked_values(data, path, text)


def parse_project_file(text: str, path: str) -> Source | None:
    """Return the values in a pyproject.toml's table ``[tool.poprun-py]``; None without the table.

    Raises:
        UsageError: The text is not TOML, or the table is not valid.
    """
    if not _NAMES_OUR_TABLE.search(text):
        return None
    tool = _parsed_toml(text, path).get("tool")
    if not isinstance(tool, dict):
        return None
    wrong = _PROJECT_TABLE.replace("-", "_")
    if wrong in tool:
        raise UsageError(f"{path}: unknown table [tool.{wrong}]; did you mean [tool.poprun-py]?")
    if _PROJECT_TABLE not in tool:
        return None
    # Tables before [tool.poprun-py] may have the same keys. The lines of the tables before
    # [tool.poprun-py] are replaced by empty lines, so that the line numbers in messages stay
    # correct.
    header = re.search(rf"""^[ \t]*\[.*{_PROJECT_TABLE}["' ]*\]""", text, re.M)
    before = text[: header.start()] if header else ""
    return checked_values(
        tool[_PROJECT_TABLE], path, "\n" * before.count("\n") + text[len(before) :]
    )


def _parsed_toml(text: str, path: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: the file is not valid TOML ({error})") from None


def config_text(values: Mapping[str, Any], origins: Mapping[str, Origin], path: str) -> str:
    """Return the text to write to the configuration file ``path``, with the source of each value.

    Raises:
        UsageError: The suffix of the file is unknown, or a value is not valid UTF-8 text.
    """
    sources = {name: " ".join(origins[name].label.split()) for name in values if name in origins}
    try:
        json.dumps([values, sources], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{path}: cannot write the value of an option that contains bytes other than UTF-8 text"
        ) from None
    # If the user did not give the number of replicas, it equals the number of instances. The
    # exported file then shows the number of replicas only in a comment.
    replicas = None if "num_replicas" in values else values.get("num_instances")
    if path.endswith(".json"):
        if replicas is not None:
            sources["num_replicas"] = f"{replicas}, as many as instances"
        return json.dumps({**values, **({_SOURCES: sources} if sources else {})}, indent=2) + "\n"
    if path.endswith(".toml"):
        lines = [
            f"{name.replace('_', '-')} = {_toml(value)}"
            f"{f'  # {sources[name]}' if name in sources else ''}\n"
            for name, value in values.items()
        ]
        if replicas is not None:
            lines.append(f"# num-replicas = {replicas} (as many as instances)\n")
        return "".join(lines)
    raise _unknown_suffix(path)


def _toml(value: Any) -> str:
    """Return a value as TOML text, which is JSON text with the character DEL escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unknown_suffix(path: str) -> UsageError:
    return UsageError(f"{path}: unknown suffix; expected a file name that ends in .toml or .json")


def read_text_file(path: str, option: str) -> str:
    """Return the text of a file that an option names.

    Raises:
        UsageError: The file cannot be read, or is not UTF-8 text.
    """
    try:
        # The encoding utf-8-sig skips the byte order mark that some editors write.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: the file is not UTF-8 text") from None
