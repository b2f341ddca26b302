"""Text with a terminal's colours: without them, and which there are."""

from __future__ import annotations

import re

_COLOUR = re.compile(r"\x1b\[(\d+)m")
_NAMES = {"1": "bold", "32": "green", "33": "yellow", "36": "cyan"}


def plain_lines(text):
    return _COLOUR.sub("", text).splitlines()


def colours_of(text):
    return {_NAMES[code] for code in _COLOUR.findall(text) if code != "0"}
