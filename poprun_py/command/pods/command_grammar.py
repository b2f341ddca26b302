"""Command-line grammar of ``poprun-py-pod``, as in V-IPU: ``VERB OBJECT [NAME] [options]``.

The name of an object may be singular or plural. Global options may stand before the verb or after
the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from popdist_py.pods.model import SyncType
from poprun_py.errors import nearest
from poprun_py.terminal import PrintedHelp

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# The dictionary ``meta`` of click's context has the given global options under this key.
GLOBAL_OPTIONS = "poprun_py.command.pods"
_COMMAND_NAME = "poprun-py-pod"
_OTHER_VERBS = {"delete": "remove", "rm": "remove", "ls": "list", "show": "get"}


def _keep(context: click.Context, param: click.Parameter, value: Any) -> Any:
    # A global option after the object is parsed last, so it replaces the same option before the
    # verb.
    if value is not None and value is not False:
        context.meta.setdefault(GLOBAL_OPTIONS, {})[param.name] = value
    return value


def _global_options() -> list[click.Option]:
    """Return new global options for one command, because commands cannot share option objects."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(list(names), expose_value=False, callback=_keep, **settings)

    return [
        option(
            "--pod", metavar="WHERE",
            help="The pod: its name, its folder, or http://HOST:PORT of its server. Unset: "
            "POPRUN_POD, else the only pod of this machine.",
        ),
        option("-H", "--api-host", metavar="HOST", help="The host of the pod's server."),
        option(
            "--api-port", metavar="PORT", type=click.IntRange(1, 65535),
            help="The port of the pod's server.  [default: 8090]",
        ),
        option("--showjson", is_flag=True, help="Print JSON instead of tables."),
    ]  # fmt: skip


_GLOBAL_NAMES = tuple(option.opts[-1] for option in _global_options())


class ObjectCommand(PrintedHelp, click.Command):
    """A command that applies a verb to one kind of object, such as ``create partition``.

    The command also takes the global options. Its help lists them in a separate section.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _global_options()
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's sections: examples, the command's own options, and global options."""
        if self._examples:
            with formatter.section("Examples"):
                for example in self._examples:
                    formatter.write(f"{'':{formatter.current_indent}}{_COMMAND_NAME} {example}\n")
        _write_options(self, ctx, formatter)


def object_command(
    name: str, *examples: str, text: str | None = None
) -> Callable[[Callable[..., int | None]], ObjectCommand]:
    """Return a decorator that turns a function into a command such as ``create partition``.

    Args:
        name: The name of the kind of object, such as ``partition``.
        examples: Example command lines for the help, without ``poprun-py-pod`` at the start.
        text: The command's help text; None for the function's docstring.
    """
    return click.command(
        name, cls=ObjectCommand, examples=examples, help=text, context_settings=CONTEXT
    )


def _write_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    own: list[tuple[str, str]] = []
    common: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        # Arguments are left out, because the usage line shows them.
        if record is not None and isinstance(param, click.Option):
            (common if param.opts[-1] in _GLOBAL_NAMES else own).append(record)
    for title, records in (("Options", own), ("Global options", common)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class _CommandGroup(PrintedHelp, click.Group):
    """A click group that suggests the most similar subcommand for an unknown name."""

    member = "command"

    def hint(self, word: str, names: Sequence[str]) -> str:
        """Return the suggestion that ends the error message for an unknown subcommand."""
        return nearest(word, names) or f": expected one of {', '.join(names)}"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that the first argument names, and the other arguments.

        Raises:
            UsageError: The first argument is not the name of a subcommand.
        """
        found = self.get_command(ctx, args[0])
        if found is None and not ctx.resilient_parsing:
            hint = self.hint(args[0], self.list_commands(ctx))
            raise click.UsageError(f"unknown {self.member} {args[0]!r}{hint}", ctx)
        return (found.name if found else None), found, args[1:]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands in the order in which the help lists them."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without arguments, raise a UsageError that lists the subcommands."""
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(
                f"expected {'an' if self.member[0] in 'aeiou' else 'a'} {self.member}: "
                f"one of {', '.join(self.list_commands(ctx))}",
                ctx,
            )
        return super().parse_args(ctx, args)


class VerbGroup(_CommandGroup):
    """The command ``poprun-py-pod``, whose subcommands are verbs."""

    member = "verb"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _global_options()

    def hint(self, word: str, names: Sequence[str]) -> str:
        """Return the suggestion that ends the error message for an unknown verb.

        The user may have given a synonym of a verb (``rm``), or an object without a verb.
        """
        if word in _OTHER_VERBS:
            return f"; did you mean {_OTHER_VERBS[word]}?"
        groups = (each for each in self.commands.values() if isinstance(each, ObjectGroup))
        if any(group.named(word) for group in groups):
            return f": a verb comes first, such as list {word}"
        return super().hint(word, names)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's sections: verbs, options, and global options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


class ObjectGroup(_CommandGroup):
    """The click group of one verb. Its subcommands are kinds of objects, such as ``partition``."""

    member = "object"

    def named(self, word: str) -> click.Command | None:
        """Return the subcommand for the name of an object in the singular or plural."""
        other = word.removesuffix("s") if word.endswith("s") else f"{word}s"
        return self.commands.get(word) or self.commands.get(other)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the subcommand for the name of an object in the singular or plural."""
        return self.named(cmd_name)


# ParamType takes a type argument only since click 8.4.
class SyncTypeName(click.ParamType):  # type: ignore[type-arg]
    """A click type that converts a name from V-IPU's protocol or command line to a sync type."""

    name = "TYPE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SyncType:
        """Return the sync type with this name, in upper or lower case."""
        if isinstance(value, SyncType):
            return value
        wanted = str(value).lower().replace("_", "-")
        for each in SyncType:
            if wanted in (sync_name(each), each.value.lower().replace("_", "-")):
                return each
        names = ", ".join(f"{sync_name(each)} ({each.value})" for each in SyncType)
        return self.fail(f"{value!r}: expected one of {names}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the names of sync types that begin with ``incomplete``."""
        return _items((sync_name(each) for each in SyncType), incomplete)


def sync_name(sync_type: SyncType) -> str:
    """Return a sync type's name on the command line: ``c2-compatible`` for ST_GS2_DEFAULT."""
    return sync_type.name.lower().replace("_", "-")


class ObjectName(click.ParamType):  # type: ignore[type-arg]
    """A click type for the name of an existing object.

    Args:
        known: Returns the names that the shell can complete.
    """

    name = "name"

    def __init__(self, known: Callable[[click.Context], Sequence[str]]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept any text, because only the pod knows which objects exist."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the names of existing objects that begin with ``incomplete``."""
        return _items(self._known(ctx), incomplete)


def _items(words: Iterable[str], incomplete: str) -> list[click.shell_completion.CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


# The argument NAME of a command that creates an object.
NAME = click.argument("name")
