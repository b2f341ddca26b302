"""Parsing of the launcher's command line into option values, with the same syntax as PopRun.

Users may shorten long options to a unique prefix. The value of an option must not be the name of
another option. Some spellings of mpirun and torchrun are accepted as well: ``-np``, underscores in
place of hyphens, and ``-m MODULE``. Other options of other launchers are errors with advice
(``other_launchers``). The launcher's options end where the program or ``-m MODULE`` begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poprun_py.errors import UsageError, nearest
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.option_types import FLAG, TEXT, Option, choice, option_name

VERSION_FORMAT = Option(
    group="Help",
    default="text",
    type=choice("text", "json", "full-text", "full-json"),
    help="Output format of --version. full-text and full-json also list PopDist and every"
    " dependency.",
)
# Maps each spelling of --verbose to the number that this spelling adds to the verbosity.
_VERBOSE = {"-v": 1, "-vv": 2, "-vvv": 3, "--verbose": 1, "--vv": 2}
# Options that change the names in this Python environment, instead of a launch.
NAMES_CHANGES = ("--install-names", "--remove-names")
# Options that do not accept a value, not even yes or no.
_BARE = ("--version", "--verbose", *NAMES_CHANGES)

_OPTIONS: dict[str, Option] = {
    **{option_name(field): opt for field, opt in OPTIONS.items() if field != "verbosity"},
    "--version-format": VERSION_FORMAT,
}
_SHORT = {opt.short: name for name, opt in _OPTIONS.items() if opt.short}
_NAMES = (*_OPTIONS, *_BARE, "--help", "--module")
# Maps option names of mpirun to the corresponding option names of poprun-py.
_ALIASES = {"-np": "--num-instances", "--np": "--num-instances"}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command line gives; the keys are field names of LaunchConfig.

    The value of ``program`` is the program with its arguments. The values of ``version`` and
    ``version_format`` come from --version and --version-format. The value of ``names_change`` is
    --install-names or --remove-names. If the command line has --help, the result contains only the
    help topic under ``help`` (empty for the short help), and an empty program.

    Raises:
        UsageError: An option is unknown or ambiguous, or a value is missing or not accepted.
    """
    given: list[tuple[str, str]] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "-":
        word, rest = words[position], words[position + 1 :]
        position += 1
        if word == "--":
            break
        if word in _VERBOSE:
            given.append(("--verbose", str(_VERBOSE[word])))
            continue
        name, value = _split(word)
        if name == "--help":
            return {"help": "".join(rest[:1]) if value is None else value, "program": ()}
        if name == "--module":
            return {**_values(given), "program": ("-m", *_module(word, value, rest))}
        if name in _BARE:
            if value is not None:
                raise UsageError(f"{name} does not accept a value, but {value!r} was given")
            value = "1"
        else:
            value, used = _value(name, value, word, rest)
            position += used
            before = None if _OPTIONS[name].repeatable else dict(given).get(name)
            if before is not None:
                raise UsageError(
                    f"{name} is given twice ({before!r} and {value!r}): give {name} once"
                )
        given.append((name, value))
    return {**_values(given), "program": tuple(words[position:])}


def _values(given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the values of options from pairs of an option's full name and its text."""
    values: dict[str, Any] = {}
    for name, text in given:
        field = name.removeprefix("--").replace("-", "_")
        if name == "--version":
            values["version"] = True
        elif name in NAMES_CHANGES:
            if values.setdefault("names_change", name) != name:
                raise UsageError(
                    f"{' and '.join(NAMES_CHANGES)} cannot be used together: give one of them"
                )
        elif name == "--verbose":
            values["verbosity"] = values.get("verbosity", 0) + int(text)
        elif _OPTIONS[name].repeatable:
            values[field] = (*values.get(field, ()), _OPTIONS[name].read(name, text))
        else:
            values[field] = _OPTIONS[name].read(name, text)
    return values


def _value(name: str, value: str | None, word: str, rest: Sequence[str]) -> tuple[str, int]:
    """Return the text of an option's value, and how many words of ``rest`` belong to the value.

    If the word after an option is another option, the first option has no value.
    """
    opt = _OPTIONS[name]
    if value is not None:
        return value, 0
    if opt.type is FLAG or opt.implied is not None:
        return opt.implied or "yes", 0
    expected = f"expected {opt.type.expected}"
    if not rest:
        raise UsageError(f"{word} needs a value: {expected}")
    following = rest[0]
    if following.partition("=")[0] in _NAMES:
        hint = (
            f"; if {following!r} is the value, give {word}={following}" if opt.type is TEXT else ""
        )
        raise UsageError(f"{word} needs a value, but {following!r} follows: {expected}{hint}")
    return following, 1


def _module(word: str, value: str | None, rest: Sequence[str]) -> tuple[str, ...]:
    words = tuple(rest) if value is None else (value, *rest)
    if not words or not words[0] or words[0].startswith("-"):
        raise UsageError(
            f"{word} needs a value: expected the name of a Python module, such as package.train"
        )
    return words


def _split(word: str) -> tuple[str, str | None]:
    """Split ``word`` into the full name of an option and the option's value, or None."""
    if word == "-h":
        return "--help", None
    if word == "-m":
        return "--module", None
    spelled, equals, value = word.partition("=")
    if spelled in _ALIASES:
        return _ALIASES[spelled], value if equals else None
    if not word.startswith("--"):
        # -num-replicas is a mistyped --num-replicas, not -n with the value um-replicas.
        is_long = len(spelled) > 2 and any(name.startswith(f"-{spelled}") for name in _NAMES)
        is_long = is_long or (word[:2] in _SHORT and _is_foreign(f"-{spelled}"))
        if word[:2] in _SHORT and not is_long:
            return _SHORT[word[:2]], word[2:].removeprefix("=") if len(word) > 2 else None
        if spelled not in _VERBOSE:
            raise _unknown(word, f"-{spelled}" if len(spelled) > 3 else spelled)
    if equals and spelled in _VERBOSE:
        raise UsageError(f"{spelled} does not accept a value, but {value!r} was given")
    return complete(spelled, word), value if equals else None


def complete(spelled: str, word: str) -> str:
    """Return the full name of an option from its name or from a unique prefix of its name.

    Error messages show ``word``, which the user has typed.

    Raises:
        UsageError: No option has this prefix, or several options have it.
    """
    spelled = spelled.replace("_", "-")
    if spelled in _NAMES:
        return spelled
    if _is_foreign(spelled):
        raise _unknown(word, spelled)
    matches = sorted(name for name in _NAMES if name.startswith(spelled))
    if len(matches) == 1:
        return matches[0]
    if matches:
        word = word.partition("=")[0]
        raise UsageError(f"ambiguous option {word}: expected one of {', '.join(matches[:8])}")
    raise _unknown(word, spelled)


def _is_foreign(name: str) -> bool:
    """Tell whether ``name`` is a long option of another launcher."""
    # Most command lines contain no such name, so they do not pay for the import.
    from poprun_py.options.other_launchers import foreign_options

    return bool(foreign_options(name))


def _unknown(word: str, spelled: str) -> UsageError:
    from poprun_py.options.other_launchers import foreign_hint

    word = word.partition("=")[0]  # The message omits the option's value, which may be secret.
    hint = foreign_hint(word) or nearest(spelled, _NAMES)
    return UsageError(f"unknown option {word}{hint or '; --help all lists all options'}")
