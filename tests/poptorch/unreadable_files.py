"""Files that cannot be read as what they were written for: of another layout, cut, or garbage."""

from __future__ import annotations

import pickle
import sys
import types

import torch

__all__ = ["UNREADABLE", "make_unreadable"]


def _gone(path, monkeypatch, kind="module"):
    """Write a file that names a module, or a class of one, that is gone when it is read."""
    module = types.ModuleType("gone_module")
    module.Gone = type("Gone", (), {"__module__": "gone_module"})
    monkeypatch.setitem(sys.modules, "gone_module", module)
    torch.save(module.Gone(), path)
    if kind == "module":
        monkeypatch.delitem(sys.modules, "gone_module")
    else:
        del module.Gone


def make_unreadable(path, how, monkeypatch):
    if how in ("module", "class"):
        _gone(path, monkeypatch, how)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "garbage":
        path.write_bytes(b"\x80\x02garbage" * 20)
    elif how == "text":
        path.write_text("not a model")
    else:
        path.write_bytes(pickle.dumps({"another": "content"}))


UNREADABLE = ["module", "class", "truncated", "garbage", "text", "other"]
