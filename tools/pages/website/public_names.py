"""The directive ``public-names``, which documents all names in a module's ``__all__``.

Sphinx's autodoc makes the signatures, types and docstrings. This directive chooses autodoc's
directive for each name. Names that a module imports at their first use are included.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["PublicNames", "hide_colon", "show_colon"]

# Napoleon, which turns Args: and Raises: into lists, takes "Words: more" of a property for a type.
_COLON = "\N{RATIO}"


class PublicNames(SphinxDirective):
    """``.. public-names:: MODULE``, with ``:without: NAME NAME`` for those told elsewhere."""

    required_arguments = 1
    option_spec: ClassVar = {"without": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return what autodoc makes of every public name, functions and classes in one order."""
        module = importlib.import_module(self.arguments[0])
        left_out = {"__version__", *self.options.get("without", "").split()}
        lines: list[str] = []
        for name in sorted(set(module.__all__) - left_out, key=str.lower):
            lines += _directive(f"{module.__name__}.{name}", getattr(module, name))
        source = f"<public names of {module.__name__}>"
        return self.parse_text_to_nodes(
            StringList(lines, source=source), allow_section_headings=True
        )


def _directive(name: str, value: object) -> list[str]:
    """Return the lines of autodoc's directive for one name."""
    if isinstance(value, types.ModuleType):
        return []  # it has a page of its own
    if inspect.isclass(value):
        options = ["   :members:"]
        if value.__bases__ != (object,):
            options.append("   :show-inheritance:")
        if "Enum" in {base.__name__ for base in value.__mro__}:
            options.append("   :undoc-members:")
        return [f".. autoclass:: {name}", *options, ""]
    kind = "autofunction" if inspect.isroutine(value) else "autodata"
    return [f".. {kind}:: {name}", ""]


def hide_colon(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Hide the colon in the first sentence of a property before Napoleon reads it."""
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", f"{_COLON} ")


def show_colon(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Show it again."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]
