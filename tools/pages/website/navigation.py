"""The parts of the site, and the order of the pages in each part.

The pages are plain Markdown for GitHub, but Sphinx needs lists of contents. This module adds the
lists when Sphinx reads the first page. The build fails if a page is missing here.
"""

from __future__ import annotations

from sphinx.application import Sphinx

__all__ = ["PARTS", "add_contents"]

#: The pages of each part of the site, by the title of the part.
PARTS: dict[str, tuple[str, ...]] = {
    "Tutorials": ("first-hour", "data-loading", "hands-on", "course", "pipelining", "cnns"),
    "How to": (
        *("ddp-and-mpi", "port-poptorch", "why-slow", "watching", "runs"),
        *("python", "placement", "pods", "deploy"),
    ),
    "Reference": (
        *("reference/options", "reference/commands", "reference/variables"),
        *("reference/old-spellings", "api/index", "releasing"),
    ),
    "Explanation": (
        *("architecture", "emulation", "device", "collectives", "reliability", "performance"),
        "seeds",
    ),
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to the first page the lists of all pages, which the sidebar shows."""
    if page == "index":
        for part, pages in PARTS.items():
            names = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n{names}\n```\n"
