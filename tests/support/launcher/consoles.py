"""A console for tests, which keeps the messages of the launcher."""

from __future__ import annotations


class KeptConsole:
    """Keeps the messages of each kind in a list.

    Attributes:
        said: all messages in their order, each with its kind.
        waits: the seconds and reason of each message about waiting.
    """

    def __init__(self):
        self.said = []
        self.waits = []

    def of(self, kind):
        """Return the messages of a kind, such as ``warn``."""
        return [text for each, text in self.said if each == kind]

    def log(self, line):
        self.said.append(("log", line))

    def warn(self, sentence):
        self.said.append(("warn", sentence))

    def binding(self, line):
        self.said.append(("binding", line))

    def tell(self, sentence):
        self.said.append(("tell", sentence))

    def waiting(self, seconds, reason):
        self.waits.append((seconds, reason))
