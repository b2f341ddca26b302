"""A command line -> values of options: PopRun's grammar on top of a click command.

Pure: words in, a dictionary out. click reads and documents the options that ``launch_config.py``
declares. What PopRun adds is normalised first: unique prefixes of long options, ``-vv`` and
``--vv``, an option that may stand once, and a value that must not be another option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from poprun_py.config.launch_config import GROUPS, LaunchConfig, options
from poprun_py.config.option_kinds import FLAG, TEXT, Kind, Option, choice, option_name
from poprun_py.errors import UsageError, nearest

__all__ = ["COMMAND", "help_text", "parse"]

_VERBOSE = {"-v": 1, "-vv": 2, "--verbose": 1, "--vv": 2}
_VERSION_FORMAT = Option(
    kind=choice("text", "json", "full-text", "full-json"),
    group="Help",
    help="How --version answers; full lists PopDist and every dependency too.",
)
_HELP_FLAGS = {
    "--help": "Show this help and stop.",
    "--version": "Show the version and stop.",
}

_OPTIONS: dict[str, Option] = {
    **{option_name(field): opt for field, opt in options().items() if field != "verbosity"},
    "--version-format": _VERSION_FORMAT,
}
_SHORT = {opt.short: name for name, opt in _OPTIONS.items() if opt.short}
_NAMES = (*_OPTIONS, *_HELP_FLAGS, "--verbose")
# Names of other launchers for our options, where the nearest spelling is another option.
_ELSEWHERE = {
    **dict.fromkeys(("-n", "-np", "--np", "-c", "-N"), "--num-instances"),
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node"), "--num-instances"),
    **dict.fromkeys(("--num-processes", "--num_processes"), "--num-instances"),
    **dict.fromkeys(("--nnodes", "--num-machines", "--num_machines"), "--host"),
    "-x": "--env",
    "-m": "python -m MODULE",
}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that ``words`` give, by field name of LaunchConfig.

    Only what was typed is there, and ``program``: everything from the first word that is no option.
    ``help``, ``version`` and ``version_format`` stand for the options of those names.

    Raises:
        UsageError: an unknown or ambiguous option, a missing value, or one that is not accepted.
    """
    normal, program = _normalise(words)
    try:
        context = COMMAND.make_context("poprun-py", normal, resilient_parsing=False)
    except click.UsageError as error:
        raise UsageError(error.format_message()) from None
    values = {
        name: value
        for name, value in context.params.items()
        if value not in (None, False, ())
        or context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    return {**values, "program": program}


# --- PopRun's grammar ---------------------------------------------------------------------------


def _normalise(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the options, every long one in full and as one word, and the program."""
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
        if name in _HELP_FLAGS or name == "--verbose":
            if value is not None:
                raise UsageError(f"{name} takes no value; {value!r} was given")
            normal.append(name)
            continue
        opt = _OPTIONS[name]
        if value is None and _takes_next_word(opt):
            value = _next_word(word, words, position, opt.kind)
            position += 1
        value = value if value is not None else (opt.implied or "yes")
        if name in seen and not opt.repeatable:
            raise UsageError(f"{name} is given twice ({seen[name]!r} and {value!r}): give it once")
        seen[name] = value
        normal.append(f"{name}={value}")
    return normal, tuple(words[position:])


def _takes_next_word(opt: Option) -> bool:
    return opt.kind is not FLAG and opt.implied is None


def _next_word(word: str, words: Sequence[str], position: int, kind: Kind) -> str:
    """Return the word after an option as its value, unless it is an option itself."""
    if position >= len(words):
        raise UsageError(f"{word} needs a value: expected {kind.expected}")
    following = words[position]
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
    spelled, equals, value = word.partition("=")
    if not word.startswith("--"):
        if word[:2] in _SHORT:
            return _SHORT[word[:2]], word[2:].removeprefix("=") if len(word) > 2 else None
        if spelled not in _VERBOSE:
            raise _unknown(word, f"-{spelled}" if len(spelled) > 3 else spelled)
    if equals and spelled in _VERBOSE:
        raise UsageError(f"{spelled} takes no value; {value!r} was given")
    return _complete(spelled, word), value if equals else None


def _complete(spelled: str, word: str) -> str:
    """Return the option that ``spelled`` names, in full or by a unique prefix."""
    if spelled in _NAMES:
        return spelled
    matches = sorted(name for name in _NAMES if name.startswith(spelled))
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"ambiguous option {word}: expected one of {', '.join(matches[:8])}")
    raise _unknown(word, spelled)


def _unknown(word: str, spelled: str) -> UsageError:
    ours = _ELSEWHERE.get(word.partition("=")[0])
    hint = f"; did you mean {ours}?" if ours else nearest(spelled.lower(), _NAMES)
    return UsageError(f"unknown option {word}{hint or '; --help lists all options'}")


# --- the click command --------------------------------------------------------------------------


class _Value(click.ParamType[Any]):
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


class _Grouped(click.Command):
    """A command whose help lists the options by group, with their defaults."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, purpose in {**GROUPS, "Help": ""}.items():
            rows = [
                record
                for param in self.params
                if isinstance(param, _Declared) and param.group == group
                if (record := param.get_help_record(ctx)) is not None
            ]
            with formatter.section(f"{group}: {purpose}" if purpose else group):
                formatter.write_dl(rows, col_max=32)


class _Declared(click.Option):
    """A click option made from a declaration."""

    def __init__(self, names: list[str], group: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.group = group


def _click_options() -> list[click.Parameter]:
    defaults = LaunchConfig.__dataclass_fields__
    made: list[click.Parameter] = []
    for field, opt in options().items():
        if field == "verbosity":
            made.append(
                _Declared(["-v", "--verbose", "verbosity"], opt.group, count=True, help=opt.help)
            )
            continue
        made.append(_declare(option_name(field), opt, _shown_default(defaults[field].default)))
    made.append(_declare("--version-format", _VERSION_FORMAT, "text"))
    made += [
        _Declared([name], "Help", is_flag=True, help=text) for name, text in _HELP_FLAGS.items()
    ]
    return made


def _declare(name: str, opt: Option, default: str) -> _Declared:
    note = f"  [default: {default}]" if default else ""
    metavar = f"[={opt.kind.metavar}]" if opt.implied else opt.kind.metavar
    return _Declared(
        [opt.short, name] if opt.short else [name],
        opt.group,
        type=_Value(name, opt),
        multiple=opt.repeatable,
        metavar=metavar,
        help=opt.help + note,
    )


def _shown_default(default: Any) -> str:
    if default is None or default == () or default is False:
        return "no" if default is False else ""
    return "yes" if default is True else str(default)


COMMAND = _Grouped(
    "poprun-py",
    params=_click_options(),
    add_help_option=False,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
    options_metavar="[OPTIONS]",
    help=(
        "Start PROGRAM as the instances of a distributed job. Each instance is a process that "
        "owns NUM_REPLICAS / NUM_INSTANCES replicas of an emulated IPU; a program that ends in "
        ".py runs under this Python.\n\n"
        "  poprun-py --num-instances 2 --num-replicas 8 train.py --epochs 3\n\n"
        "  poprun-py --num-instances 2 --num-replicas 8 --dry-run\n\n"
        "  poprun-py --host node[0-3] --num-instances 8 --num-replicas 64 train.py\n\n"
        "Options end at PROGRAM; they may be given as --option VALUE or --option=VALUE, and "
        "shortened as long as they stay unique. A yes|no value may also be on, off, true, false, "
        "1 or 0."
    ),
)
COMMAND.params.append(
    click.Argument(["program"], nargs=-1, metavar="PROGRAM [ARGUMENTS]", expose_value=False)
)


def help_text(columns: int) -> str:
    """Return the help, grouped, at most ``columns`` (and 100) wide."""
    context = click.Context(
        COMMAND, info_name="poprun-py", terminal_width=max(40, min(columns, 100))
    )
    return COMMAND.get_help(context)
