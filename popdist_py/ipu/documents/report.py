"""The base class of reports, which can be printed, shown by rich, and shown in a notebook.

The module ``report`` does not depend on what a report is about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from popdist_py.ipu.documents.document import Document, html, text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Report"]


class Report(ABC):
    """The base class of results that are displayed as a headline (one line of text) with tables."""

    __slots__ = ()

    @abstractmethod
    def document(self) -> Document:
        """Return the headline and tables that display this result."""

    def __str__(self) -> str:
        return text(self.document())

    def __rich__(self) -> RenderableType:
        # The library rich is imported inside the method ``__rich__``, so that programs that only
        # print or store reports do not import rich.
        from popdist_py.ipu.documents.tables import rendered

        return rendered(self.document())

    def _repr_html_(self) -> str:
        return html(self.document())
