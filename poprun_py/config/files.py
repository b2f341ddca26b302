"""LaunchConfig from and to files: TOML by the suffix .toml, JSON by .json.

Field names of LaunchConfig are the keys, with hyphens or underscores. Unknown keys are refused.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from poprun_py.config.launch_config import LaunchConfig, options
from poprun_py.config.option_kinds import FLAG, YES_NO, Option, option_name
from poprun_py.errors import UsageError, nearest

__all__ = ["config_from_dict", "config_to_dict", "dump_config", "parse_config"]


def config_to_dict(config: LaunchConfig) -> dict[str, Any]:
    """Return the options of ``config`` that differ from their defaults, and the program."""
    declared = options()
    values = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if (f.name == "program" or declared[f.name].saved) and getattr(config, f.name) != f.default
    }
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def config_from_dict(data: Any, source: str = "configuration") -> LaunchConfig:
    """Return the configuration described by ``data``.

    Raises:
        UsageError: an unknown key (the nearest is named) or a value that is not accepted.
    """
    return LaunchConfig(**checked_values(data, source))


def checked_values(data: Any, source: str) -> dict[str, Any]:
    """Return ``data`` as keyword arguments of LaunchConfig.

    Raises:
        UsageError: ``data`` is no table, has an unknown key, or a value that is not accepted.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected a table of options, such as num-replicas = 8")
    declared = options()
    saved = {name: opt for name, opt in declared.items() if opt.saved}
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
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
            raise UsageError(
                f"{source}: unknown option {key!r}{nearest(name, saved)}; --help lists all options"
            )
        if name in values:
            raise UsageError(f"{source}: {key!r} is given twice")
        values[name] = _checked(saved[name], f"{source}: {key}", value)
    return values


def _checked(opt: Option, name: str, value: Any) -> Any:
    """Return a value of a file; yes and no may be written there as on the command line."""
    if value is None:
        return None
    if isinstance(value, str) and opt.kind in (YES_NO, FLAG):
        return opt.read(name, value)
    return opt.check(name, value)


def parse_config(text: str, path: str) -> dict[str, Any]:
    """Parse the content of configuration file ``path`` into keyword arguments of LaunchConfig.

    Raises:
        UsageError: the suffix is unknown, or the text is malformed.
    """
    if path.endswith(".json"):
        try:
            data = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not JSON ({error})") from None
    elif path.endswith(".toml"):
        import tomllib

        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not TOML ({error})") from None
    else:
        raise _unknown_suffix(path)
    return checked_values(data, path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table of JSON's pairs; TOML refuses a key that stands twice by itself."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return table


def dump_config(config: LaunchConfig, path: str) -> str:
    """Return the text of configuration file ``path``.

    Raises:
        UsageError: the suffix is unknown, or a value cannot be written as text.
    """
    data = config_to_dict(config)
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path}: an option holds bytes that are no UTF-8 text") from None
    if path.endswith(".json"):
        return json.dumps(data, indent=2) + "\n"
    if path.endswith(".toml"):
        return "".join(
            f"{name.replace('_', '-')} = {_toml(value)}\n" for name, value in data.items()
        )
    raise _unknown_suffix(path)


def _toml(value: Any) -> str:
    """Return a TOML value: JSON's numbers, booleans and lists are TOML's, its texts nearly so."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unknown_suffix(path: str) -> UsageError:
    return UsageError(f"{path}: unknown suffix; expected a file that ends in .toml or .json")
