"""Parameter types for click that accept the values of the launcher's options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from poprun_py.options.option_types import OptionType


# click's ParamType is a generic class only since click 8.4.
class ClickType(click.ParamType):  # type: ignore[type-arg]
    """A click parameter type that reads and completes values of an OptionType.

    Args:
        option_type: The type of the values.
        complete: A function that returns the words for shell completion, such as the names of
            existing pods, from click's context. Without this function, the choices of
            ``option_type`` are completed.
    """

    def __init__(
        self,
        option_type: OptionType,
        complete: Callable[[click.Context], Iterable[str]] | None = None,
    ) -> None:
        self.name = option_type.metavar
        self._type = option_type
        self._complete = complete

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert the text after an option on the command line to the option's value."""
        if not isinstance(value, str):
            return value
        try:
            read = self._type.read(value)
        except (ValueError, OverflowError, KeyError):
            read = None
        if read is None or not self._type.accepts(read):
            self.fail(f"{value!r}: expected {self._type.expected}", param, ctx)
        return self._type.normalise(read)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the words that complete the text ``incomplete``."""
        from click.shell_completion import CompletionItem

        words = self._type.choices if self._complete is None else self._complete(ctx)
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]
