"""The help pages of poprun-py, and the click command for help, completion and documentation.

The help has a short page, a page for each group and each option, and a page with all options.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from poprun_py.errors import UsageError, nearest
from poprun_py.options.command_line import VERSION_FORMAT, complete
from poprun_py.options.declared_options import GROUPS, OPTION_VARIABLES, OPTIONS, variable_name
from poprun_py.options.option_types import Option, option_name
from poprun_py.terminal import command_name

MOST_USED = (
    *("num_instances", "num_replicas", "host", "env", "output_dir"),
    *("only_output_from_instance", "timeout", "max_restarts"),
    *("print_topology", "dry_run", "verbosity"),
)
_MOST_COLUMNS = 100
USAGE = "[OPTIONS] PROGRAM [ARGUMENTS]"
PURPOSE = (
    "Start a distributed job, whose instances (processes) all run PROGRAM. Each instance has "
    "NUM_REPLICAS / NUM_INSTANCES replicas of the model on emulated IPUs. A program whose name "
    "ends in .py runs under the Python of this command."
)
EXAMPLES = (
    "-n 2 train.py --epochs 3",
    "-n 2 --num-replicas 8 --dry-run train.py",
    "--host node[0-3] -n 8 --num-replicas 64 -m package.train",
)
_COMMANDS = {
    "jobs": "list the jobs that run on this machine",
    "stop JOB...": "end running jobs, and wait for their end",
    "runs [DIR]": "list recorded runs by state, tag, name and time, and remove old ones",
    "report RUN": "write an HTML page about a run that --output-dir recorded",
    "compare RUN RUN...": "compare speed, loss, time to a target and efficiency of recorded runs",
    "scale PROGRAM": "run a program with several numbers of instances, and show how it scales",
}
GRAMMAR = (
    "The options of poprun-py end at PROGRAM or -m MODULE. Write --option VALUE or "
    "--option=VALUE. A unique prefix of an option's name is accepted. The words on, true and 1 "
    "also mean yes, and the words off, false and 0 also mean no. A TIME is a number of seconds "
    "such as 90, or a text such as 90s, 5m, 1h30m or 2d."
)
PLACES = (
    "Options are also read from environment variables (POPRUN_NUM_INSTANCES=2), from the "
    "configuration file of --import-config, and from the table [tool.poprun-py] of the nearest "
    "pyproject.toml. The command line takes precedence over environment variables. Environment "
    "variables take precedence over files. The file of --import-config takes precedence over "
    "pyproject.toml."
)
# The help topic that shows the manual page, which this module does not contain.
MANUAL = "manual"
_DOCUMENTATION = (
    "{command} --help manual shows the manual. docs/index.md in the source lists tutorials and "
    "guides, also for users of torchrun, mpirun or srun. make docs builds them as a website."
)


class HelpOption(click.Option):
    """A click option with its group in the help; ``name`` is its field in LaunchConfig, if any."""

    def __init__(self, names: list[str], group: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.group = group


def _click_option(field: str, opt: Option) -> HelpOption:
    if field == "verbosity":
        names = ["-v", "--verbose", field]
        return HelpOption(names, opt.group, count=True, help=opt.help)
    name, default = option_name(field), default_text(opt)
    return HelpOption(
        [opt.short, name] if opt.short else [name],
        opt.group,
        # The launcher's own parser reads option values; click only completes option values.
        type=click.Choice(opt.type.choices) if opt.type.choices else None,
        multiple=opt.repeatable,
        metavar=f"[={opt.type.metavar}]" if opt.implied else opt.type.metavar,
        help=f"{opt.help}  [default: {default}]" if default else opt.help,
    )


def default_text(opt: Option) -> str:
    """Return an option's default as text; empty for an option without a default."""
    if opt.default is None or opt.default == ():
        return ""
    if isinstance(opt.default, bool):
        return "yes" if opt.default else "no"
    return str(opt.default)


COMMAND = click.Command(
    "poprun-py",
    params=[
        HelpOption(
            ["-m", "--module"], "Job", metavar="MODULE",
            help="Run a Python module as the program, as python -m does. -m MODULE ends the"
            " options.",
        ),
        *(_click_option(field, opt) for field, opt in OPTIONS.items()),
        HelpOption(
            ["-h", "--help"], "Help", metavar="[TOPIC]",
            help="Show the short help, or the help of TOPIC. TOPIC is a group of options, an"
            " option, a command, all or manual.",
        ),
        HelpOption(
            ["--install-names"], "Environment", is_flag=True,
            help="Install the packages poptorch, popdist, horovod and popart into this Python"
            " environment, so that every program can import the emulation. Then exit.",
        ),
        HelpOption(
            ["--remove-names"], "Environment", is_flag=True,
            help="Remove the packages that --install-names wrote, and exit.",
        ),
        HelpOption(["--version"], "Help", is_flag=True, help="Show the version, and exit."),
        _click_option("version_format", VERSION_FORMAT),
        click.Argument(["program"], nargs=-1, metavar="PROGRAM [ARGUMENTS]", expose_value=False),
    ],
    add_help_option=False,
    context_settings={"allow_interspersed_args": False},
)  # fmt: skip
_DECLARED = [param for param in COMMAND.params if isinstance(param, HelpOption)]


def help_text(topic: str, columns: int) -> str:
    """Return a page of help; the page is ``columns`` wide, but at least 40 and at most 100.

    ``topic`` is ``all``, the beginning of a group's name, or an option; empty for the short page.

    Raises:
        UsageError: The topic is unknown.
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


# --- topics of --help ---------------------------------------------------------------------------


def _group(topic: str) -> str:
    """Return the option group whose name begins with ``topic``; empty unless exactly one does."""
    wanted = topic.lower().replace("-", " ").replace("_", " ")
    groups = {group.lower(): group for group in GROUPS}
    found = [groups[wanted]] if wanted in groups else []
    found = found or [group for name, group in groups.items() if name.startswith(wanted)]
    return found[0] if len(found) == 1 else ""


def _option(topic: str) -> HelpOption:
    """Return the option that ``topic`` names; the name may lack its leading hyphens."""
    by_name = {name: option for option in _DECLARED for name in option.opts}
    if topic in by_name:
        return by_name[topic]
    try:
        return by_name[complete(f"--{topic.lstrip('-').lower()}", topic)]
    except UsageError:
        from poprun_py.options.other_launchers import foreign_hint

        names = (name.removeprefix("--") for name in by_name)
        commands = [form.split()[0] for form in _COMMANDS]
        topics = (*map(str.lower, GROUPS), *commands, *names, "all", MANUAL)
        hint = foreign_hint(topic) if topic.startswith("-") else ""
        if hint:
            raise UsageError(f"--help {topic!r}{hint}") from None
        raise UsageError(
            f"--help {topic!r}: expected all, an option, a command ({', '.join(commands)}), a "
            f"group of options ({', '.join(GROUPS)}) or {MANUAL}"
            f"{nearest(topic.removeprefix('--'), topics)}"
        ) from None


# --- pages of help ------------------------------------------------------------------------------


def _write_short(formatter: click.HelpFormatter) -> None:
    _write_beginning(formatter)
    by_name = {option.name: option for option in _DECLARED}
    _write_options(formatter, "Most used options", (by_name[name] for name in MOST_USED))
    with formatter.section(f"Commands, each with --help: {command_name()} COMMAND"):
        formatter.write_dl(list(_COMMANDS.items()))
    with formatter.section(f"More help: {command_name()} --help TOPIC"):
        rows = [(group.lower(), purpose) for group, purpose in GROUPS.items()]
        rows += [("OPTION", "a single option, such as --help timeout"), ("all", "all options")]
        formatter.write_dl(rows)
    formatter.write_paragraph()
    formatter.write_text(_DOCUMENTATION.format(command=command_name()))


def _write_all(formatter: click.HelpFormatter) -> None:
    _write_beginning(formatter)
    _write_indented(formatter, GRAMMAR)
    for group in GROUPS:
        _write_group(formatter, group)
    _write_options(formatter, "Help", (o for o in _DECLARED if o.group == "Help"))


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
    own = (option for option in _DECLARED if option.group == group)
    _write_options(formatter, f"{group}: {GROUPS[group]}", own)
    if group == "Configuration":
        _write_indented(formatter, PLACES)


def _write_option(formatter: click.HelpFormatter, option: HelpOption) -> None:
    """Write the help of one option, with its environment variable and configuration-file key."""
    _write_options(formatter, option.group, (option,))
    field = str(option.name)
    variable = variable_name(field)
    if variable in OPTION_VARIABLES:
        key = field.replace("_", "-")
        in_files = f", and so does {key} in a configuration file" if OPTIONS[field].saved else ""
        text = f"The environment variable {variable} also sets {option_name(field)}{in_files}."
        _write_indented(formatter, text)


def _write_indented(formatter: click.HelpFormatter, text: str) -> None:
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text)


def _write_options(
    formatter: click.HelpFormatter, title: str, options: Iterable[HelpOption]
) -> None:
    context = click.Context(COMMAND, info_name=command_name())
    rows = [record for option in options if (record := option.get_help_record(context))]
    with formatter.section(title):
        # On a narrow screen, the column of the option names has at most two fifths of the width.
        formatter.write_dl(rows, col_max=min(32, formatter.width * 2 // 5))
