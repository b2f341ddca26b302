"""Where the texts and boxes of an SVG stand, as a reader of the file finds them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

SVG = "{http://www.w3.org/2000/svg}"
_FONT = re.compile(r"\.(\w+)\{font:(\d+) (\d+)px")
# Widths of the ASCII letters from the blank on in hundredths of the size: DejaVu Sans, then bold.
_REGULAR, _BOLD = (tuple(map(int, widths.split())) for widths in (
    """
32 40 46 84 64 95 78 27 39 39 50 84 32 36 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 84 84 53
100 68 69 70 77 63 58 77 75 29 29 66 56 86 75 79 60 79 69 63 61 73 68 99 69 61 69 39 34 39 84 50
50 61 63 55 63 62 35 63 63 28 28 58 28 97 63 61 63 63 41 52 39 63 59 82 59 59 52 64 34 64 84
""",
    """
35 46 52 84 70 100 87 31 46 46 52 84 38 42 38 37 70 70 70 70 70 70 70 70 70 70 40 40 84 84 84 58
100 77 76 73 83 68 68 82 84 37 37 77 64 100 84 85 73 85 77 72 68 81 77 110 77 72 73 46 37 46 84
50 50 67 72 59 72 68 44 72 71 34 34 67 34 104 71 69 72 72 49 60 48 71 65 92 65 65 58 71 37 71 84
""",
))  # fmt: skip
_OTHER = 100


@dataclass(frozen=True)
class Box:
    kind: str
    left: float
    top: float
    right: float
    bottom: float
    text: str = ""

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and self.right >= other.right
            and self.top <= other.top
            and self.bottom >= other.bottom
        )


def boxes(text: str) -> tuple[list[Box], list[Box]]:
    """Return the texts and the rectangles of a picture; the first rectangle is all of it."""
    root = ElementTree.fromstring(text)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    style = root.findtext(f"{SVG}style") or ""
    fonts = {
        kind: (_BOLD if int(weight) > 400 else _REGULAR, float(size))
        for kind, weight, size in _FONT.findall(style)
    }
    found = list(_boxes(root, 0, 0, fonts))
    texts = [box for box in found if box.text]
    return texts, [Box("all", 0, 0, width, height), *(box for box in found if not box.text)]


def _boxes(
    element: ElementTree.Element,
    x: float,
    y: float,
    fonts: dict[str, tuple[tuple[int, ...], float]],
) -> Iterator[Box]:
    for child in element:
        moved = re.fullmatch(r"translate\((\d+) (\d+)\)", child.get("transform", "translate(0 0)"))
        left, top = x + float(moved[1]), y + float(moved[2])
        own_x, own_y = left + float(child.get("x", 0)), top + float(child.get("y", 0))
        kind = child.get("class", "")
        if child.tag == f"{SVG}text":
            widths, size = fonts[kind]
            letters = (ord(letter) - 32 for letter in child.text or "")
            width = sum(widths[n] if n < len(widths) else _OTHER for n in letters) * size / 100
            start = own_x - width / 2 if kind == "label" else own_x
            yield Box(
                kind, start, own_y - 0.8 * size, start + width, own_y + 0.2 * size, child.text
            )
        elif child.tag == f"{SVG}rect":
            right, bottom = own_x + float(child.get("width")), own_y + float(child.get("height"))
            yield Box(kind, own_x, own_y, right, bottom)
        yield from _boxes(child, left, top, fonts)
