"""Command-line grammar of ``poprun-py-pod``, as in V-IPU: ``VERB OBJECT [NAME] [options]``.

OBJECT may be singular or plural, such as ``partition`` or ``partitions``. Global options may stand
before the verb or after the object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from poprun_py.command.click_commands import CONTEXT, PrintedHelp
from poprun_py.errors import nearest

# The key of the given global options in the dictionary ``meta`` of click's context.
GLOBAL_OPTIONS = "poprun_py.command.pods"
_COMMAND_NAME = "poprun-py-pod"
_OTHER_VERBS = {"delete": "remove", "rm": "remove", "ls": "list", "show": "get"}


class _GlobalOption(click.Option):
    """An option of ``poprun-py-pod`` that may stand before the verb or after the object."""

    def __init__(self, *names: str, **settings: Any) -> None:
        super().__init__(list(names), expose_value=False, callback=_keep, **settings)


def _keep(context: click.Context, param: click.Parameter, value: Any) -> Any:
    # If a global option is given twice, before the verb and after the object, the last value
    # counts.
    if value is not None and value is not False:
        context.meta.setdefault(GLOBAL_OPTIONS, {})[param.name] = value
    return value


_GLOBAL_OPTIONS = (
    _GlobalOption(
        "--pod", metavar="WHERE",
        help="The pod to use: its name, its folder, or the URL http://HOST:PORT of its server. "
        "Unset: the pod that POPRUN_POD names, or else the only pod of this machine.",
    ),
    _GlobalOption("-H", "--api-host", metavar="HOST", help="The host of the pod's server."),
    _GlobalOption(
        "--api-port", metavar="PORT", type=click.IntRange(1, 65535),
        help="The port of the pod's server.  [default: 8090]",
    ),
    _GlobalOption("--showjson", is_flag=True, help="Print JSON instead of tables."),
)  # fmt: skip


def _write_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Write two sections of a command's help: the command's own options, and the global options."""
    # Positional arguments are omitted, because the usage line of the help shows them.
    options = [each for each in command.get_params(ctx) if isinstance(each, click.Option)]
    for title, is_global in (("Options", False), ("Global options", True)):
        shown = [each for each in options if isinstance(each, _GlobalOption) is is_global]
        records = [record for each in shown if (record := each.get_help_record(ctx))]
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class ObjectCommand(PrintedHelp):
    """A command that applies a verb to one kind of object, such as ``create partition``.

    The command also takes the global options, which its help lists in a separate section.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _GLOBAL_OPTIONS
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write these sections of the help: examples, the command's own options, global options."""
        if self._examples:
            with formatter.section("Examples"):
                for example in self._examples:
                    formatter.write(f"{'':{formatter.current_indent}}{_COMMAND_NAME} {example}\n")
        _write_options(self, ctx, formatter)


def object_command(
    name: str, *examples: str, text: str | None = None
) -> Callable[[Callable[..., int | None]], ObjectCommand]:
    """Return a decorator that turns a function into a command for one kind of object.

    Args:
        name: The name of the kind of object, such as ``partition``.
        examples: Example command lines for the help, without ``poprun-py-pod`` at the start.
        text: The command's help text; None for the function's docstring.
    """
    return click.command(
        name, cls=ObjectCommand, examples=examples, help=text, context_settings=CONTEXT
    )


class _CommandGroup(PrintedHelp, click.Group):
    """A click group that suggests a similar subcommand if the given subcommand is unknown."""

    member = "command"

    def hint(self, ctx: click.Context, word: str) -> str:
        """Return the suggestion that ends the error message for an unknown subcommand."""
        names = self.list_commands(ctx)
        return nearest(word, names) or f": expected one of {', '.join(names)}"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that the first argument names, and the remaining arguments."""
        found = self.get_command(ctx, args[0])
        if found is None and not ctx.resilient_parsing:
            hint = self.hint(ctx, args[0])
            raise click.UsageError(f"unknown {self.member} {args[0]!r}{hint}", ctx)
        return (found.name if found else None), found, args[1:]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands in the order in which the help lists them."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without arguments, raise a UsageError that lists the subcommands."""
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(
                f"the {self.member} is missing: expected one of "
                f"{', '.join(self.list_commands(ctx))}",
                ctx,
            )
        return super().parse_args(ctx, args)


class VerbGroup(_CommandGroup):
    """The command ``poprun-py-pod``, whose subcommands are verbs."""

    member = "verb"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _GLOBAL_OPTIONS

    def hint(self, ctx: click.Context, word: str) -> str:
        """Return the suggestion for an unknown verb, such as ``remove`` for ``delete``."""
        if word in _OTHER_VERBS:
            return f"; did you mean {_OTHER_VERBS[word]}?"
        groups = (each for each in self.commands.values() if isinstance(each, ObjectGroup))
        if any(group.get_command(ctx, word) for group in groups):
            return f": give a verb before the object, such as list {word}"
        return super().hint(ctx, word)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write these sections of the help: verbs, options, and global options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


class ObjectGroup(_CommandGroup):
    """The click group of one verb, with a subcommand for each kind of object."""

    member = "object"

    def __init__(self, name: str, text: str, *commands: click.Command) -> None:
        super().__init__(
            name,
            help=text,
            commands=commands,
            context_settings=CONTEXT,
            options_metavar="",
            subcommand_metavar="OBJECT [NAME] [OPTIONS]",
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the subcommand for a kind of object, named in the singular or plural."""
        is_plural = cmd_name.endswith("s")
        other = cmd_name[:-1] if is_plural else f"{cmd_name}s"
        return self.commands.get(cmd_name) or self.commands.get(other)
