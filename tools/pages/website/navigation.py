"""The order of the pages: parts of the site, and the pages of each.

The pages are plain Markdown, which GitHub shows too; Sphinx asks for lists of contents in them,
which are made of this table when a page is read. A page that is nowhere here fails the build.
"""

from __future__ import annotations

from sphinx.application import Sphinx

__all__ = ["PARTS", "add_contents"]

# Page -> (caption, pages below it).
PARTS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "index": (
        (
            "Tutorials",
            (
                *("first-hour", "three-users", "data-loading", "hands-on", "course"),
                *("pipelining", "cnns"),
                *("examples/language_model", "examples/ddp", "examples/mpi"),
            ),
        ),
        (
            "How to",
            (
                *("other-launchers", "python"),
                *("multi-host", "slurm", "deploy", "placement", "pods", "devices"),
                *("debugging", "observe", "timeline", "metrics", "monitoring"),
                *("runs", "report", "compare"),
                *("port-poptorch", "horovod", "torch-backend"),
            ),
        ),
        (
            "Reference",
            (
                *("options/index", "commands", "environment-variables"),
                *("api/index", "old-spellings", "compatibility"),
                *("changelog", "releasing"),
            ),
        ),
        (
            "Explanation",
            (
                *("architecture", "emulation", "device", "collectives", "reliability"),
                *("performance", "seeds", "tutorials-verbatim"),
                *("security", "contributing"),
            ),
        ),
    ),
    "options/index": (
        (
            "",
            (
                *("job", "hosts", "placement", "inspection", "output", "supervision"),
                *("environment", "mpi", "configuration", "ipu-hardware"),
            ),
        ),
    ),
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to a page the lists of what stands below it, which the sidebar shows."""
    for caption, pages in PARTS.get(page, ()):
        caption_line = f":caption: {caption}\n" if caption else ""
        names = "\n".join(pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n{caption_line}\n{names}\n```\n"
