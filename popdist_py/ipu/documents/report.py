"""A value that shows itself as a document wherever it is: print, rich, a notebook.

Nothing here knows what is in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from popdist_py.ipu.documents.document import Document, html, text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Report"]


class Report(ABC):
    """What has a document."""

    __slots__ = ()

    @abstractmethod
    def document(self) -> Document:
        """Return what is shown."""

    def __str__(self) -> str:
        return text(self.document())

    def __rich__(self) -> RenderableType:
        # Late: who only prints or stores a report never imports rich.
        from popdist_py.ipu.documents.tables import rendered

        return rendered(self.document())

    def _repr_html_(self) -> str:
        return html(self.document())
