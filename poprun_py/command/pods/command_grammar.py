"""The grammar of ``poprun-py-pod``, which is V-IPU's: ``VERB OBJECT [NAME] [options]``.

An object may be singular or plural. Global options may stand before the verb or after the object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from popdist_py.pods.model import SyncType
from poprun_py.errors import nearest
from poprun_py.terminal import PrintedHelp

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# The key of the given global options in the ``meta`` of click's context.
GLOBAL_OPTIONS = "poprun_py.command.pods"
_COMMAND_NAME = "poprun-py-pod"
_OTHER_VERBS = {"delete": "remove", "rm": "remove", "ls": "list", "show": "get"}


def _keep(context: click.Context, param: click.Parameter, value: Any) -> Any:
    # The option after the object is read later and so replaces one before the verb.
    if value is not None and value is not False:
        context.meta.setdefault(GLOBAL_OPTIONS, {})[param.name] = value
    return value


def _global_options() -> list[click.Option]:
    """Return new option objects, because an option belongs to one command."""

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
    """A verb for one kind of object, which also takes the global options.

    Its help lists the global options separately.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _global_options()
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the command's own options, and the global options."""
        if self._examples:
            with formatter.section("Examples"):
                for example in self._examples:
                    formatter.write(f"{'':{formatter.current_indent}}{_COMMAND_NAME} {example}\n")
        _write_options(self, ctx, formatter)


def object_command(
    name: str, *examples: str, text: str | None = None
) -> Callable[[Callable[..., int | None]], ObjectCommand]:
    """Return a decorator that makes a function the command of a verb for one kind of object.

    Args:
        name: The kind of object.
        examples: For the help, without the name ``poprun-py-pod``.
        text: The help; None for the function's docstring.
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
        # The usage line describes the arguments.
        if record is not None and isinstance(param, click.Option):
            (common if param.opts[-1] in _GLOBAL_NAMES else own).append(record)
    for title, records in (("Options", own), ("Global options", common)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class _CommandGroup(PrintedHelp, click.Group):
    """A group of commands that answers an unknown name with the most similar one."""

    member = "command"

    def hint(self, word: str, names: Sequence[str]) -> str:
        """Return the end of the error about an unknown word."""
        return nearest(word, names) or f": expected one of {', '.join(names)}"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command for the first word.

        Raises:
            UsageError: The word is not the name of a command.
        """
        found = self.get_command(ctx, args[0])
        if found is None and not ctx.resilient_parsing:
            hint = self.hint(args[0], self.list_commands(ctx))
            raise click.UsageError(f"unknown {self.member} {args[0]!r}{hint}", ctx)
        return (found.name if found else None), found, args[1:]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; without words, raise a UsageError that lists the commands."""
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
        """Suggest the verb for a verb of other commands, and for an object in a verb's place."""
        if word in _OTHER_VERBS:
            return f"; did you mean {_OTHER_VERBS[word]}?"
        groups = (each for each in self.commands.values() if isinstance(each, ObjectGroup))
        if any(group.named(word) for group in groups):
            return f": a verb comes first, such as list {word}"
        return super().hint(word, names)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs and the options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


class ObjectGroup(_CommandGroup):
    """A verb, whose subcommands are kinds of objects."""

    member = "object"

    def named(self, word: str) -> click.Command | None:
        """Return the command for an object in the singular or plural."""
        other = word.removesuffix("s") if word.endswith("s") else f"{word}s"
        return self.commands.get(word) or self.commands.get(other)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command for an object in the singular or plural."""
        return self.named(cmd_name)


# click names the type of the value only from 8.4 on.
class SyncTypeName(click.ParamType):  # type: ignore[type-arg]
    """A sync type, by its name in V-IPU's protocol or on V-IPU's command line."""

    name = "TYPE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SyncType:
        """Return the sync type of a name in any letter case."""
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
        """Return the names that begin with ``incomplete``."""
        return _items((sync_name(each) for each in SyncType), incomplete)


def sync_name(sync_type: SyncType) -> str:
    """Return the command line's name of a sync type: ``c2-compatible`` for ST_GS2_DEFAULT."""
    return sync_type.name.lower().replace("_", "-")


class ObjectName(click.ParamType):  # type: ignore[type-arg]
    """The name of an existing object; ``known`` returns the names that a shell may complete."""

    name = "name"

    def __init__(self, known: Callable[[click.Context], Sequence[str]]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept any text, because only the pod knows the names."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the names that begin with ``incomplete``."""
        return _items(self._known(ctx), incomplete)


def _items(words: Iterable[str], incomplete: str) -> list[click.shell_completion.CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


# The name of a new object.
NAME = click.argument("name")
