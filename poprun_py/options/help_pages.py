"""The help: a short page for newcomers, a page for each group and option, and one with all.

Made from the declarations of the options; only the words around them stand here.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

from poprun_py.console import command_name
from poprun_py.errors import UsageError, nearest
from poprun_py.options.command_line import COMMAND, Declared, complete
from poprun_py.options.environment_variables import OPTION_VARIABLES
from poprun_py.options.launch_config import GROUPS, options
from poprun_py.options.option_origins import variable_name

MOST_USED = (
    *("num_instances", "num_replicas", "host", "env", "output_dir"),
    *("only_output_from_instance", "timeout", "max_restarts"),
    *("print_topology", "dry_run", "verbosity"),
)
_MOST_COLUMNS = 100
USAGE = "[OPTIONS] PROGRAM [ARGUMENTS]"
PURPOSE = (
    "Start PROGRAM as the instances of a distributed job. Each instance is a process that owns "
    "NUM_REPLICAS / NUM_INSTANCES replicas of an emulated IPU; a program that ends in .py runs "
    "under this Python."
)
EXAMPLES = (
    "-n 2 train.py --epochs 3",
    "-n 2 --num-replicas 8 --dry-run train.py",
    "--host node[0-3] -n 8 --num-replicas 64 -m package.train",
)
_COMMANDS = {
    "report RUN": "a run that --output-dir kept, as a page for a browser",
    "compare RUN RUN...": "such runs side by side: speed, loss, time to a target, efficiency",
    "scale PROGRAM": "run it with several numbers of instances, and show how its speed grows",
}
GRAMMAR = (
    "Options end at PROGRAM or -m MODULE; they may be given as --option VALUE or --option=VALUE, "
    "and shortened as long as they stay unique. A yes|no value may also be on, off, true, false, "
    "1 or 0; a TIME is 90, 90s, 5m, 1h30m or 2d."
)
PLACES = (
    "Options are also read from variables (POPRUN_NUM_INSTANCES=2), from the file of "
    "--import-config, and from the table [tool.poprun-py] of the nearest pyproject.toml. The "
    "command line wins over variables, those over the file, that over pyproject.toml."
)
# A build of the site has no address of its own: it lies where it was made.
_ELSEWHERE = (
    "The manual: man {command}. Tutorials and how-to: docs/index.md of the source, which make docs "
    "builds as a site."
)


def help_text(topic: str, columns: int) -> str:
    """Return the help on ``topic``: empty for the short one, ``all``, a group or an option.

    Args:
        topic: what was asked for, in any letter case; a group may be shortened.
        columns: width of the screen; at most 100 are used.

    Raises:
        UsageError: there is no such topic.
    """
    formatter = click.HelpFormatter(width=max(40, min(columns, _MOST_COLUMNS)))
    if topic in ("", "--"):
        _write_short(formatter)
    elif topic.lower() == "all":
        _write_all(formatter)
    elif topic.startswith("-"):
        _write_option(formatter, _option(topic))
    else:
        group = _group(topic)
        if group:
            _write_group(formatter, group)
        else:
            _write_option(formatter, _option(topic))
    return formatter.getvalue().rstrip("\n")


# --- topics -------------------------------------------------------------------------------------


def _group(topic: str) -> str:
    """Return the group that ``topic`` names or begins; nothing if there is none."""
    wanted = topic.lower().replace("-", " ").replace("_", " ")
    groups = {group.lower(): group for group in GROUPS}
    found = [groups[wanted]] if wanted in groups else []
    found = found or [group for name, group in groups.items() if name.startswith(wanted)]
    return found[0] if len(found) == 1 else ""


def _option(topic: str) -> Declared:
    """Return the option that ``topic`` names, with or without its hyphens.

    Raises:
        UsageError: it names none, or several.
    """
    by_name = {name: option for option in _declared() for name in option.opts}
    if topic in by_name:
        return by_name[topic]
    try:
        return by_name[complete(f"--{topic.lstrip('-').lower()}", topic)]
    except UsageError:
        names = (name.removeprefix("--") for name in by_name)
        topics = (*map(str.lower, GROUPS), *names, "all")
        raise UsageError(
            f"--help {topic!r}: expected all, an option, or a group ({', '.join(GROUPS)})"
            f"{nearest(topic.removeprefix('--'), topics)}"
        ) from None


def _declared() -> list[Declared]:
    return [param for param in COMMAND.params if isinstance(param, Declared)]


# --- pages --------------------------------------------------------------------------------------


def _write_short(formatter: click.HelpFormatter) -> None:
    """Write what a newcomer needs."""
    _write_beginning(formatter)
    by_field = {option.field: option for option in _declared() if option.field}
    _write_options(formatter, "Most used options", (by_field[name] for name in MOST_USED))
    with formatter.section(f"Commands, each with --help: {command_name()} COMMAND"):
        formatter.write_dl(list(_COMMANDS.items()))
    with formatter.section(f"More help: {command_name()} --help TOPIC"):
        rows = [(group.lower(), purpose) for group, purpose in GROUPS.items()]
        rows += [("OPTION", "one option, such as --help timeout"), ("all", "every option")]
        formatter.write_dl(rows)
    formatter.write_paragraph()
    formatter.write_text(_ELSEWHERE.format(command=command_name()))


def _write_all(formatter: click.HelpFormatter) -> None:
    _write_beginning(formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(GRAMMAR)
    for group in GROUPS:
        _write_group(formatter, group)
    _write_options(formatter, "Help", (o for o in _declared() if o.group == "Help"))


def _write_beginning(formatter: click.HelpFormatter) -> None:
    formatter.write_usage(command_name(), USAGE)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(PURPOSE)
        formatter.write_paragraph()
        with formatter.indentation():
            for example in EXAMPLES:
                formatter.write_text(f"{command_name()} {example}")


def _write_group(formatter: click.HelpFormatter, group: str) -> None:
    own = (option for option in _declared() if option.group == group)
    _write_options(formatter, f"{group}: {GROUPS[group]}", own)
    if group == "Configuration":
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(PLACES)


def _write_option(formatter: click.HelpFormatter, option: Declared) -> None:
    """Write one option, and the other places where it may be given."""
    _write_options(formatter, option.group, (option,))
    variable = variable_name(option.field)
    if variable in OPTION_VARIABLES:
        key = option.field.replace("_", "-")
        in_files = f", and as {key} in a file of options" if options()[option.field].saved else ""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"Also as the variable {variable}{in_files}.")


def _write_options(formatter: click.HelpFormatter, title: str, which: Iterable[Declared]) -> None:
    context = click.Context(COMMAND, info_name=command_name())
    rows = [record for option in which if (record := option.get_help_record(context))]
    with formatter.section(title):
        # On a narrow screen names leave room for the words beside them.
        formatter.write_dl(rows, col_max=min(32, formatter.width * 2 // 5))
