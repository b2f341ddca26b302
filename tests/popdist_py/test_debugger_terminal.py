"""The terminal that the wrapper lends to the debugger, and its return."""

from __future__ import annotations

from popdist_py import debugger


def test_the_program_goes_on_when_the_terminal_is_lent_no_more(monkeypatch):
    asked = []
    lent = [7, 7, 7, 0]  # the wrapper is late
    monkeypatch.setattr(debugger, "_ask", lambda *words: asked.append(words))
    monkeypatch.setattr(debugger, "_is_terminal", lambda *_: True)
    monkeypatch.setattr(debugger.heartbeat, "lent_terminal", lambda: lent.pop(0))
    terminal = debugger._Terminal(5)
    terminal.give_back()
    assert asked == [("enter", 5), ("leave", 5)]
    assert lent == []
