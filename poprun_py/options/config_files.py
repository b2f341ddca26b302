"""LaunchConfig from and to files: TOML by the suffix .toml, JSON by .json; and pyproject.toml.

Field names of LaunchConfig are the keys, with hyphens or underscores. Unknown keys are refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from poprun_py.errors import UsageError, nearest
from poprun_py.options.launch_config import LaunchConfig, options
from poprun_py.options.option_origins import Origin, in_file
from poprun_py.options.option_types import Option, option_name
from poprun_py.texts import read_json

_PROJECT_TABLE = "poprun-py"
# Reading TOML costs more than everything else before a launch: other projects' files are not read.
_NAMES_OUR_TABLE = re.compile(r"""poprun[-_]py["']?\s*[].=]""")
# What --export-config adds for people.
_SOURCES = "sources"


def config_to_dict(config: LaunchConfig) -> dict[str, Any]:
    """Return the program, and the options that were given or differ from their defaults."""
    values: dict[str, Any] = {"program": config.program} if config.program else {}
    for name, opt in options().items():
        if opt.saved and config.is_given(name):
            value = getattr(config, name)
            # Of what can be given, only "all" instances are kept as None.
            values[name] = "all" if value is None else value
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def config_from_dict(data: Any, source: str = "configuration") -> LaunchConfig:
    """Return the configuration described by ``data``.

    Raises:
        UsageError: an unknown key (the nearest is named) or a value that is not accepted.
    """
    return LaunchConfig(**checked_values(data, source))


def checked_values(data: Any, source: str, text: str = "") -> dict[str, Any]:
    """Return ``data`` as keyword arguments of LaunchConfig, with ``origins``.

    Args:
        data: the table.
        source: the file, as messages name it.
        text: the text of the table, where a message is to tell the line.

    Raises:
        UsageError: ``data`` is no table, has an unknown key, or a value that is not accepted.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected a table of options, such as num-replicas = 8")
    declared = options()
    saved = {name: opt for name, opt in declared.items() if opt.saved}
    file, values = source, {}
    origins: dict[str, Origin] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        source = file + _line_of(key, text)
        if name == _SOURCES and isinstance(value, dict):
            continue
        if name == "program":
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise UsageError(f"{source}: program {value!r}: expected a list of texts")
            values[name] = tuple(value)
            continue
        if name in declared and name not in saved:
            raise UsageError(
                f"{source}: {key!r} is no part of a configuration; give "
                f"{option_name(name)} on the command line"
            )
        if name not in saved:
            # Named as the key is spelled.
            known = saved if "_" in key else [option.replace("_", "-") for option in saved]
            hint = nearest(key, known) or "; --help all lists them"
            raise UsageError(f"{source}: unknown option {key!r}{hint}")
        if name in values:
            raise UsageError(f"{source}: {key!r} is given twice")
        if value is not None:
            values[name] = _checked(saved[name], f"{source}: {key}", value)
            origins[name] = in_file(key, file)
    return {**values, "origins": origins}


def _checked(opt: Option, name: str, value: Any) -> Any:
    """Return a value of a file; yes, no and times may be written as on the command line."""
    if isinstance(value, str) and opt.kind.is_text_in_files:
        return opt.read(name, value)
    return opt.check(name, value)


def _line_of(key: str, text: str) -> str:
    """Return ``, line N`` for the line on which ``key`` is given a value, if it is found."""
    found = re.search(rf"""^[ \t{{,]*["']?{re.escape(key)}["']?[ \t]*[=:]""", text, re.M)
    return f", line {text.count(chr(10), 0, found.end()) + 1}" if found else ""


def parse_config(text: str, path: str) -> dict[str, Any]:
    """Parse the content of configuration file ``path`` into keyword arguments of LaunchConfig.

    Raises:
        UsageError: the suffix is unknown, or the text is malformed.
    """
    if path.endswith(".json"):
        try:
            data = read_json(text)
        except ValueError as error:
            raise UsageError(f"{path}: not JSON ({error})") from None
    elif path.endswith(".toml"):
        data = _parsed_toml(text, path)
    else:
        raise _unknown_suffix(path)
    return checked_values(data, path, text)


def parse_project_file(text: str, path: str) -> dict[str, Any] | None:
    """Parse the table ``[tool.poprun-py]`` of a pyproject.toml; None if it has none.

    Raises:
        UsageError: the text is malformed, or the table is.
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
    # Keys of other tables stand before ours or behind it; blank lines keep the count of lines.
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
        raise UsageError(f"{path}: not TOML ({error})") from None


def dump_config(config: LaunchConfig, path: str) -> str:
    """Return the text of configuration file ``path``, which tells where each value came from.

    Raises:
        UsageError: the suffix is unknown, or a value cannot be written as text.
    """
    data = config_to_dict(config)
    sources = {n: " ".join(config.origins[n].source.split()) for n in data if n in config.origins}
    try:
        json.dumps([data, sources], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path}: an option holds bytes that are no UTF-8 text") from None
    if path.endswith(".json"):
        if _follows_instances(config):
            sources["num_replicas"] = f"{config.num_replicas}, as many as instances"
        return json.dumps({**data, **({_SOURCES: sources} if sources else {})}, indent=2) + "\n"
    if path.endswith(".toml"):
        note = f"# {config.shown('num_replicas')}\n" if _follows_instances(config) else ""
        return (
            "".join(
                f"{name.replace('_', '-')} = {_toml(value)}"
                f"{f'  # {sources[name]}' if name in sources else ''}\n"
                for name, value in data.items()
            )
            + note
        )
    raise _unknown_suffix(path)


def _follows_instances(config: LaunchConfig) -> bool:
    """Tell whether the replicas are as many as instances: worth a note, and no value to keep."""
    return config.is_given("num_instances") and not config.is_given("num_replicas")


def _toml(value: Any) -> str:
    """Return a TOML value: JSON's numbers, booleans and lists are TOML's, its texts nearly so."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unknown_suffix(path: str) -> UsageError:
    return UsageError(f"{path}: unknown suffix; expected a file that ends in .toml or .json")


def read_text_file(path: str, option: str) -> str:
    """Return the text of a file that an option names.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        # Editors of other systems begin a file with a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: not a UTF-8 text file") from None
