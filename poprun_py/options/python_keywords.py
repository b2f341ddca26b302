"""Options as keyword arguments of Python: ``launch(program, hosts=["a"], env={"X": 1})``.

``keyword_types.py`` declares the same arguments for type checkers and editors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from os import PathLike, fsdecode, fspath

from poprun_py.errors import UsageError, nearest
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.option_origins import Source, from_python
from poprun_py.options.option_types import option_name, plain

# Options of the command that are not keyword arguments, because the Python package has functions
# for the same purposes.
COMMAND_LINE_ONLY = tuple(name for name, opt in OPTIONS.items() if not opt.saved and name != "live")
KEYWORDS = (*(name for name in OPTIONS if name not in COMMAND_LINE_ONLY), "hosts")
_INSTEAD = {
    "dry_run": "poprun_py.plan(...) returns the plan and its command",
    "print_topology": "print(poprun_py.plan(...)) shows the topology",
    "from_plan": "give the LaunchPlan object instead of the program",
    "import_config": "LaunchConfig.from_file(...) reads a configuration file",
}
# Arguments of the functions launch, start and plan, but not options of a launch.
_ARGUMENTS = (
    *("target", "args", "kwargs", "program", "environ"),
    *("show", "log", "warn", "tell_binding", "descriptors"),
)


def from_keywords(
    keywords: Mapping[str, object], program: Sequence[object] | None = None
) -> Source:
    """Return the option values that keyword arguments give, and the program, with origins.

    If a keyword argument is None, the option of this name has its default value. Times and indices
    may be texts as on the command line.

    Raises:
        UsageError: A keyword is unknown, or a value or a word of the program is not accepted.
    """
    if keywords.get("host") is not None and keywords.get("hosts") is not None:
        raise UsageError("host and hosts cannot be used together: give one of them")
    values: Source = {}
    if program is not None:
        values["program"] = _words(program), from_python("program")
    for name, value in keywords.items():
        _require_known(name)
        origin = from_python(name)
        if name == "hosts":
            if value is not None:
                values["host"] = _host_list(value), origin
        elif name == "env" and isinstance(value, Mapping):
            values["env"] = tuple(_variable(key, each) for key, each in value.items()), origin
        elif name == "tag" and isinstance(value, Mapping):
            tags = (f"{key}={_word(each, f'tag {key}')}" for key, each in value.items())
            values["tag"] = OPTIONS["tag"].check("tag", tuple(tags)), origin
        elif value is not None or OPTIONS[name].default is not None:
            values[name] = OPTIONS[name].check_or_read(name, value), origin
    return values


def _require_known(name: str) -> None:
    if name in COMMAND_LINE_ONLY:
        instead = _INSTEAD.get(name)
        raise UsageError(
            f"{name} is an option of the command poprun-py only{': ' + instead if instead else ''}"
        )
    if name in _ARGUMENTS:
        raise UsageError(
            f"{name} is not an option of a launch, and this function does not accept {name}"
        )
    if name not in KEYWORDS:
        from poprun_py.options.other_launchers import foreign_hint

        hint = foreign_hint(option_name(name)) or nearest(name, (*KEYWORDS, *_ARGUMENTS))
        raise UsageError(
            f"unknown option {name!r}{hint or '; poprun-py --help all lists all options'}"
        )


def _words(program: Sequence[object]) -> tuple[str, ...]:
    if isinstance(program, str | bytes) or not isinstance(program, Sequence):
        shown = ascii(program)
        raise UsageError(
            f"program {shown if len(shown) <= 60 else shown[:57] + '...'}: expected a list of "
            'words (the program and its arguments), such as ["train.py", "--lr", 0.1]'
        )
    return tuple(
        _word(word, f"word {number} of the program") for number, word in enumerate(program)
    )


def _host_list(hosts: object) -> str:
    if isinstance(hosts, str):
        return hosts
    if not isinstance(hosts, Sequence) or not all(isinstance(host, str) for host in hosts):
        raise UsageError(
            f'hosts {hosts!r}: expected a list of names of hosts, such as ["a", "b:2"]'
        )
    if not hosts:
        raise UsageError(
            "hosts is an empty list: expected at least one host, or None for this machine"
        )
    return ",".join(hosts)


def _variable(name: object, value: object) -> str:
    """Return ``NAME=VALUE`` for an environment variable; error messages hide the value."""
    if not isinstance(name, str) or not name or "=" in name:
        raise UsageError(f"env: {name!r} is not the name of a variable: expected a text without =")
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
    # Python's bools are rejected, because programs expect different spellings of true and false.
    if isinstance(number, bool):
        given = "a bool" if is_secret else str(number)
    elif isinstance(number, Number):
        # A NumPy number is converted to text directly: as a Python float, a float32 of 0.1 would
        # have more digits.
        return str(value if isinstance(value, Number) else number)
    else:
        given = f"of type {type(value).__name__}"
    raise UsageError(f"{place} is {given}: expected a text, a number or a path")
