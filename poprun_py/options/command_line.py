"""A command line -> values of options: PopRun's grammar on top of a click command.

Pure: words in, a dictionary out. click reads the options that ``launch_config.py`` declares, and
help_pages.py documents them. What PopRun adds is normalised first: unique prefixes of long options,
``-vv`` and ``--vv``, an option that may stand once, and a value that must not be another option. So
are the habits of mpirun and torchrun: ``-np``, underscores, and ``-m MODULE``, which ends the
options as a program does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from poprun_py.errors import UsageError, nearest
from poprun_py.options.launch_config import LaunchConfig, options
from poprun_py.options.option_types import FLAG, TEXT, Kind, Option, choice, option_name

# The words before a Python module in place of a program.
MODULE = ("-m", "--module")

_VERBOSE = {"-v": 1, "-vv": 2, "-vvv": 3, "--verbose": 1, "--vv": 2}
_VERSION_FORMAT = Option(
    kind=choice("text", "json", "full-text", "full-json"),
    group="Help",
    help="How --version answers; full lists PopDist and every dependency too.",
)
# Options that take no value, not even yes or no.
_BARE = ("--version", "--verbose")

_OPTIONS: dict[str, Option] = {
    **{option_name(field): opt for field, opt in options().items() if field != "verbosity"},
    "--version-format": _VERSION_FORMAT,
}
_SHORT = {opt.short: name for name, opt in _OPTIONS.items() if opt.short}
_NAMES = (*_OPTIONS, *_BARE, "--help", "--module")
# mpirun's names for our options.
_ALIASES = {"-np": "--num-instances", "--np": "--num-instances"}
# Names of other launchers for our options, where the nearest spelling is another option.
_ELSEWHERE = {
    **dict.fromkeys(("-c", "-N", "--num-processes"), "--num-instances"),
    **dict.fromkeys(("--nnodes", "--num-machines"), "--host"),
    "-x": "--env",
}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that ``words`` give, by field name of LaunchConfig.

    Only what was typed is there, and ``program``: everything from the first word that is no option.
    ``version`` and ``version_format`` stand for the options of those names. ``help`` is what help
    was asked for, empty for the short one; then nothing else counts.

    Raises:
        UsageError: an unknown or ambiguous option, a missing value, or one that is not accepted.
    """
    normal = _normalise(words)
    if normal.topic is not None:
        return {"help": normal.topic, "program": ()}
    try:
        context = COMMAND.make_context("poprun-py", normal.options, resilient_parsing=False)
    except click.UsageError as error:
        raise UsageError(error.format_message()) from None
    values = {
        name: value
        for name, value in context.params.items()
        if value not in (None, False, ())
        or context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    return {**values, "program": normal.program}


# --- PopRun's grammar ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Words:
    """The options, every long one in full and as one word; the program; and the topic of help.

    ``topic`` is None where no help was asked for, and empty for the short one.
    """

    options: list[str]
    program: tuple[str, ...] = ()
    topic: str | None = None


def _normalise(words: Sequence[str]) -> _Words:
    """Return the words in the one way in which click reads them."""
    normal: list[str] = []
    seen: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("-") or word == "-":
            break
        position += 1
        if word == "--":
            break
        if word in _VERBOSE:
            normal += ["-v"] * _VERBOSE[word]
            continue
        name, value = _split(word)
        if name == "--help":
            following = "".join(words[position : position + 1])
            return _Words([], topic=following if value is None else value)
        if name == "--module":
            return _Words(normal, ("-m", *_module(word, value, words[position:])))
        if name in _BARE:
            if value is not None:
                raise UsageError(f"{name} takes no value; {value!r} was given")
            normal.append(name)
            continue
        value, used = _value(name, value, word, words[position:])
        position += used
        if name in seen and not _OPTIONS[name].repeatable:
            raise UsageError(f"{name} is given twice ({seen[name]!r} and {value!r}): give it once")
        seen[name] = value
        normal.append(f"{name}={value}")
    return _Words(normal, tuple(words[position:]))


def _value(name: str, value: str | None, word: str, rest: Sequence[str]) -> tuple[str, int]:
    """Return the value of an option, and how many of the words after it were used."""
    opt = _OPTIONS[name]
    if value is not None:
        return value, 0
    if opt.kind is FLAG or opt.implied is not None:
        return opt.implied or "yes", 0
    return _next_word(word, rest, opt.kind), 1


def _module(word: str, value: str | None, rest: Sequence[str]) -> tuple[str, ...]:
    """Return the module that ``-m`` names, and its arguments."""
    words = tuple(rest) if value is None else (value, *rest)
    if not words or not words[0] or words[0].startswith("-"):
        raise UsageError(f"{word} needs a value: expected a Python module, such as package.train")
    return words


def _next_word(word: str, rest: Sequence[str], kind: Kind) -> str:
    """Return the word after an option as its value, unless it is an option itself."""
    if not rest:
        raise UsageError(f"{word} needs a value: expected {kind.expected}")
    following = rest[0]
    if following.partition("=")[0] in _NAMES:
        hint = f"; if that is the value: {word}={following}" if kind is TEXT else ""
        raise UsageError(
            f"{word} needs a value; {following!r} follows: expected {kind.expected}{hint}"
        )
    return following


def _split(word: str) -> tuple[str, str | None]:
    """Return the full name of the option in ``word`` and the value after ``=``, if there is one."""
    if word == "-h":
        return "--help", None
    if word == "-m":
        return "--module", None
    spelled, equals, value = word.partition("=")
    if spelled in _ALIASES:
        return _ALIASES[spelled], value if equals else None
    if not word.startswith("--"):
        # -num-replicas is a long option that lacks a hyphen, not -n with a value.
        is_long = len(spelled) > 2 and any(name.startswith(f"-{spelled}") for name in _NAMES)
        if word[:2] in _SHORT and not is_long:
            return _SHORT[word[:2]], word[2:].removeprefix("=") if len(word) > 2 else None
        if spelled not in _VERBOSE:
            raise _unknown(word, f"-{spelled}" if len(spelled) > 3 else spelled)
    if equals and spelled in _VERBOSE:
        raise UsageError(f"{spelled} takes no value; {value!r} was given")
    return complete(spelled, word), value if equals else None


def complete(spelled: str, word: str) -> str:
    """Return the option that ``spelled`` names, in full or by a unique prefix.

    Raises:
        UsageError: it names none, or several; ``word`` is what was typed.
    """
    spelled = spelled.replace("_", "-")
    if spelled in _NAMES:
        return spelled
    matches = sorted(name for name in _NAMES if name.startswith(spelled))
    if len(matches) == 1:
        return matches[0]
    if matches:
        word = word.partition("=")[0]
        raise UsageError(f"ambiguous option {word}: expected one of {', '.join(matches[:8])}")
    raise _unknown(word, spelled)


def _unknown(word: str, spelled: str) -> UsageError:
    word = word.partition("=")[0]  # a value may be secret
    ours = _ELSEWHERE.get(word.replace("_", "-"))
    hint = f"; did you mean {ours}?" if ours else nearest(spelled, _NAMES)
    return UsageError(f"unknown option {word}{hint or '; --help all lists all options'}")


# --- the click command --------------------------------------------------------------------------


# click names the type of the value only from 8.4 on.
class _Value(click.ParamType):  # type: ignore[type-arg]
    """Reads a value the way its option does; the error is ours, one line."""

    def __init__(self, name: str, opt: Option) -> None:
        self.name = opt.kind.metavar
        self._option_name = name
        self._option = opt

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._option.read(self._option_name, value) if isinstance(value, str) else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        items = click.shell_completion.CompletionItem
        return [items(word) for word in self._option.kind.choices if word.startswith(incomplete)]


class Declared(click.Option):
    """A click option made from a declaration; ``field`` is that of LaunchConfig, if it has one."""

    def __init__(self, names: list[str], group: str, field: str = "", **settings: Any) -> None:
        super().__init__(names, **settings)
        self.group = group
        self.field = field


def _click_options() -> list[click.Parameter]:
    defaults = LaunchConfig.__dataclass_fields__
    made: list[click.Parameter] = [
        # Never read by click: what follows is the module's own.
        Declared(
            list(MODULE), "Job", metavar="MODULE",
            help="Run a Python module as the program, as python -m does; ends the options.",
        )
    ]  # fmt: skip
    for field, opt in options().items():
        if field == "verbosity":
            names = ["-v", "--verbose", "verbosity"]
            made.append(Declared(names, opt.group, field, count=True, help=opt.help))
            continue
        default = _shown_default(defaults[field].default)
        made.append(_declare(option_name(field), opt, default, field))
    made.append(
        Declared(
            ["-h", "--help"], "Help", metavar="[TOPIC]",
            help="Show the short help, that of a group or option, or that of all options.",
        )
    )  # fmt: skip
    made.append(Declared(["--version"], "Help", is_flag=True, help="Show the version and stop."))
    made.append(_declare("--version-format", _VERSION_FORMAT, "text"))
    return made


def _declare(name: str, opt: Option, default: str, field: str = "") -> Declared:
    note = f"  [default: {default}]" if default else ""
    metavar = f"[={opt.kind.metavar}]" if opt.implied else opt.kind.metavar
    return Declared(
        [opt.short, name] if opt.short else [name],
        opt.group,
        field,
        type=_Value(name, opt),
        multiple=opt.repeatable,
        metavar=metavar,
        help=opt.help + note,
    )


def _shown_default(default: Any) -> str:
    if default is None or default == () or default is False:
        return "no" if default is False else ""
    return "yes" if default is True else str(default)


COMMAND = click.Command(
    "poprun-py",
    params=[
        *_click_options(),
        click.Argument(["program"], nargs=-1, metavar="PROGRAM [ARGUMENTS]", expose_value=False),
    ],
    add_help_option=False,
    context_settings={"allow_interspersed_args": False},
)
