"""The grammar of V-IPU's command line: ``VERB OBJECT [NAME] [options]``.

Objects may be singular or plural, and the global options stand before the verb or after the
object. Nothing here asks a pod, except for the names that a shell completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from popdist_py.pods.values import SyncType
from poprun_py.errors import nearest
from poprun_py.terminal import PrintedHelp

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_CALLED = "poprun-py-pod"
_OTHER_VERBS = {"delete": "remove", "rm": "remove", "ls": "list", "show": "get"}
# Under this key a context keeps the global options that were given, wherever they stood.
KEPT = "poprun_py.pod_tools"


def _keep(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Keep a global option; one after the object comes later, and wins."""
    if value is not None and value is not False:
        context.meta.setdefault(KEPT, {})[param.name] = value
    return value


def _global(*names: str, **settings: Any) -> click.Option:
    return click.Option(list(names), expose_value=False, callback=_keep, **settings)


def _global_options() -> list[click.Option]:
    """Return new ones: an option belongs to one command."""
    return [
        _global(
            "--pod", metavar="WHERE",
            help="The pod: its name, its folder, or http://HOST:PORT of its server. Unset: "
            "POPRUN_POD, else the only pod of this machine.",
        ),
        _global("-H", "--api-host", metavar="HOST", help="The host of the pod's server."),
        _global(
            "--api-port", metavar="PORT", type=click.IntRange(1, 65535),
            help="The port of the pod's server.  [default: 8090]",
        ),
        _global("--showjson", is_flag=True, help="Print JSON in place of tables."),
    ]  # fmt: skip


_GLOBAL_NAMES = tuple(option.opts[-1] for option in _global_options())


class Action(PrintedHelp, click.Command):
    """What is done to one kind of object; takes the global options too, and lists them apart."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _global_options()
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the own options, and then the global ones."""
        if self._examples:
            with formatter.section("Examples"):
                for example in self._examples:
                    formatter.write(f"{'':{formatter.current_indent}}{_CALLED} {example}\n")
        _write_options(self, ctx, formatter)


def action(name: str, *examples: str) -> Callable[[Callable[..., int | None]], Action]:
    """Return the decorator of an action; an example is what follows the command's name."""
    return click.command(name, cls=Action, examples=examples, context_settings=CONTEXT)


def _write_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    own: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        # What an argument is, the line of usage says.
        if record is not None and isinstance(param, click.Option):
            (others if param.opts[-1] in _GLOBAL_NAMES else own).append(record)
    for title, records in (("Options", own), ("Global options", others)):
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


class _Words(PrintedHelp, click.Group):
    """Commands by name; an unknown one is answered with the nearest."""

    what = "command"

    def hint(self, word: str, names: Sequence[str]) -> str:
        """Return what may have been meant by an unknown word."""
        return nearest(word, names) or f": expected one of {', '.join(names)}"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a word.

        Raises:
            UsageError: there is none.
        """
        found = self.get_command(ctx, args[0])
        if found is None and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            word = args[0]
            raise click.UsageError(f"unknown {self.what} {word!r}{self.hint(word, names)}", ctx)
        return (found.name if found else None), found, args[1:]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; without any of them the help is shown."""
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(
                f"expected {'an' if self.what[0] in 'aeiou' else 'a'} {self.what}: "
                f"one of {', '.join(self.list_commands(ctx))}",
                ctx,
            )
        return super().parse_args(ctx, args)


class Verbs(_Words):
    """The command itself: its commands are verbs."""

    what = "verb"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _global_options()

    def hint(self, word: str, names: Sequence[str]) -> str:
        """Know V-IPU's older verb, those of other commands, and an object in a verb's place."""
        if word in _OTHER_VERBS:
            return f"; did you mean {_OTHER_VERBS[word]}?"
        groups = (each for each in self.commands.values() if isinstance(each, Objects))
        if any(word.removesuffix("s") in (name, name.removesuffix("s"))
               for group in groups for name in group.commands):  # fmt: skip
            return f": a verb comes first, such as list {word}"
        return super().hint(word, names)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of all verbs, and the verbs."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)


class Objects(_Words):
    """A verb: its commands are kinds of objects, each also known by its other number."""

    what = "object"

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find an object by its singular or plural."""
        other = cmd_name.removesuffix("s") if cmd_name.endswith("s") else f"{cmd_name}s"
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, other)


# click names the type of the value only from 8.4 on.
class Sync(click.ParamType):  # type: ignore[type-arg]
    """A sync type by the name of the protocol, or that of the command line."""

    name = "TYPE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SyncType:
        """Read a name, in any letter case."""
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
        """Return the names that begin so."""
        return _items((sync_name(each) for each in SyncType), incomplete)


def sync_name(sync_type: SyncType) -> str:
    """Return the command line's name of a sync type: ``c2-compatible`` for ST_GS2_DEFAULT."""
    return sync_type.name.lower().replace("_", "-")


class Names(click.ParamType):  # type: ignore[type-arg]
    """The name of an object of the pod; ``known`` returns those that there are, for a shell."""

    name = "name"

    def __init__(self, known: Callable[[click.Context], Sequence[str]]) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take any text: the pod knows what it holds."""
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the names that begin so."""
        return _items(self._known(ctx), incomplete)


def _items(words: Any, incomplete: str) -> list[click.shell_completion.CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


# The name of what is made.
NAME = click.argument("name")
