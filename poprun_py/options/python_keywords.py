"""Options as keywords of Python: ``launch(program, num_instances=2, hosts=["a"], env={"X": 1})``.

Words, lists and mappings in, a LaunchConfig out. A configuration read from a file, or made from
another one, is made here as well. How keywords are typed: keyword_types.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from os import PathLike, fsdecode, fspath
from pathlib import Path
from typing import Any

from poprun_py.errors import UsageError, explain_os_error, nearest
from poprun_py.options.config_files import parse_config
from poprun_py.options.keyword_types import LaunchOptions
from poprun_py.options.launch_config import LaunchConfig, options
from poprun_py.options.layers import merged
from poprun_py.options.option_origins import Origin, from_python
from poprun_py.options.option_types import plain

# What the command does in place of a launch, or before one; the functions of Python do that.
COMMAND_LINE_ONLY = tuple(
    name for name, opt in options().items() if not opt.saved and name != "live"
)
_INSTEAD = {
    "dry_run": "poprun_py.plan(...) returns the plan and its command",
    "print_topology": "print(poprun_py.plan(...)) shows it",
    "from_plan": "give the LaunchPlan itself",
    "import_config": "LaunchConfig.from_file(...) reads it",
}
# What launch, start and plan take besides options.
_ARGUMENTS = (
    *("target", "args", "kwargs", "program", "environ"),
    *("show", "log", "warn", "tell_binding", "descriptors"),
)


def config_of(program: Sequence[object], options: Mapping[str, object]) -> LaunchConfig:
    """Return the configuration that a program and keywords give.

    Args:
        program: the program and its arguments; numbers and paths are words as ``str`` writes them.
        options: LaunchConfig's fields; besides, ``hosts`` is a list or a text, ``env`` may be a
            mapping, and times and indices may be written as on the command line.

    Raises:
        UsageError: a keyword is unknown (the nearest is named), or a value is not accepted.
    """
    return merged({"program": words_of(program)}, _layer(options))


def config_from_file(
    path: str | PathLike[str], changes: Mapping[str, object], program: Sequence[object] | None
) -> LaunchConfig:
    """Return the configuration of a TOML or JSON file, with what Python gives besides.

    Raises:
        UsageError: the file cannot be read, or something in it or given is not accepted.
    """
    if not isinstance(path, str | bytes | PathLike) or "\0" in fsdecode(path):
        raise UsageError(f"{path!r}: expected the path of a .toml or .json file")
    name = fsdecode(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: no UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise UsageError(explain_os_error(error, "the configuration cannot be read")) from None
    given = {} if program is None else {"program": words_of(program)}
    return merged(parse_config(text, name), given, _layer(changes))


def changed_config(
    config: LaunchConfig, changes: Mapping[str, object], program: Sequence[object] | None
) -> LaunchConfig:
    """Return ``config`` with other values; where two options exclude one another the new counts.

    Raises:
        UsageError: a keyword is unknown, a value is not accepted, or values contradict.
    """
    changed = {"host" if name == "hosts" else name for name in changes}
    kept = {n: getattr(config, n) for n in options() if config.is_given(n) and n not in changed}
    origins = {name: origin for name, origin in config.origins.items() if name in kept}
    words = config.program if program is None else words_of(program)
    return merged({**kept, "program": words, "origins": origins}, _layer(changes))


def words_of(program: Sequence[object]) -> tuple[str, ...]:
    """Return a program and its arguments as words.

    Raises:
        UsageError: it is one text, or something in it is no text, number or path.
    """
    if isinstance(program, str | bytes) or not isinstance(program, Sequence):
        shown = ascii(program)
        raise UsageError(
            f"program {shown if len(shown) <= 60 else shown[:57] + '...'}: expected a list of "
            'words, such as ["train.py", "--lr", 0.1]'
        )
    return tuple(
        _word(word, f"word {number} of the program") for number, word in enumerate(program)
    )


def _layer(options: Mapping[str, object]) -> dict[str, Any]:
    """Return keywords as one place of options; what is None has its default.

    Raises:
        UsageError: a keyword is unknown, or a value is not accepted.
    """
    if options.get("host") is not None and options.get("hosts") is not None:
        raise UsageError("host and hosts exclude one another: give one")
    values: dict[str, Any] = {}
    for name, value in options.items():
        _require_known(name)
        if name == "hosts" and value is not None:
            values["host"] = _host_list(value)
        elif name == "env" and isinstance(value, Mapping):
            values["env"] = tuple(_variable(key, each) for key, each in value.items())
        elif name != "hosts" and not (value is None and _default(name) is None):
            values[name] = _value(name, value)
    origins: dict[str, Origin] = {
        name: from_python("hosts" if name == "host" and "hosts" in options else name)
        for name in values
    }
    return {**values, "origins": origins}


def _require_known(name: str) -> None:
    if name in COMMAND_LINE_ONLY:
        instead = _INSTEAD.get(name)
        raise UsageError(
            f"{name} is an option of the command line alone{': ' + instead if instead else ''}"
        )
    if name in _ARGUMENTS:
        raise UsageError(f"{name} is no option, and this function of poprun_py does not take it")
    if name not in LaunchOptions.__annotations__:
        known = (*LaunchOptions.__annotations__, *_ARGUMENTS)
        hint = nearest(name, known) or "; poprun-py --help all lists them, with hyphens"
        raise UsageError(f"unknown option {name!r}{hint}")


def _default(name: str) -> object:
    default: object = LaunchConfig.__dataclass_fields__[name].default
    return default


def _value(name: str, value: object) -> object:
    """Return a checked value; yes, no, times and indices may be texts as on the command line."""
    opt = options()[name]
    if isinstance(value, str) and opt.kind.is_text_in_files:
        return opt.read(name, value)
    return opt.check(name, value)


def _host_list(hosts: object) -> str:
    if isinstance(hosts, str):
        return hosts
    if not isinstance(hosts, Sequence) or not all(isinstance(host, str) for host in hosts):
        raise UsageError(f'hosts {hosts!r}: expected a list of names, such as ["a", "b:2"]')
    if not hosts:
        raise UsageError("hosts []: expected at least one host; None: this machine")
    return ",".join(hosts)


def _variable(name: object, value: object) -> str:
    """Return ``NAME=VALUE``; the value may be secret and is never named."""
    if not isinstance(name, str) or not name or "=" in name:
        raise UsageError(f"env: {name!r} is no name of a variable: expected a text without =")
    word = _word(value, f"variable {name} of env", is_secret=True)
    if "\0" in name + word:
        raise UsageError(f"variable {name} of env: expected a text without NUL characters")
    return f"{name}={word}"


def _word(value: object, place: str, *, is_secret: bool = False) -> str:
    if isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, bytes):
        return fsdecode(value)
    number = plain(value)
    if isinstance(number, str):
        return str.__str__(number)
    # What a truth is as a word differs from program to program.
    if isinstance(number, bool):
        given = "a bool" if is_secret else str(number)
    elif isinstance(number, Number):
        # float32's 0.1 has more digits as a float.
        return str(value if isinstance(value, Number) else number)
    else:
        given = f"of type {type(value).__name__}"
    raise UsageError(f"{place} is {given}: expected a text, a number or a path")
