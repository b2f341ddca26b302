"""Which replica back ends a program may take: those that compute what the loop does.

Knows the registry in ``execution/backends.py``, and none of its names. Nothing here measures how
fast they are: the first steps do.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from popdist_py.poptorch.calls.nested_values import Call
from popdist_py.poptorch.compilation.agreement import Agreement
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.execution import backends
from popdist_py.poptorch.execution.backends import Backend
from popdist_py.poptorch.execution.replicas import DeviceModel, Replicas
from popdist_py.poptorch.logger import logger

__all__ = ["Agreed", "BackendChoice", "Wanted"]


# Where finding one back end took longer, in seconds, operations are many and large: what another
# one saves around them does not count, and looking for it does.
_ENOUGH_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Agreed:
    """Back ends that agreed with the loop; ``are_all``: the others were refused or not wanted."""

    names: frozenset[str] = frozenset()
    are_all: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What back ends are wanted.

    Attributes:
        name: "auto" for the fastest, or the name or the option of a back end.
        fastest_before: with "auto", the name of what was the fastest in an earlier run, if known.
        trusted: those that agreed when this very model was compiled before: they are not compared
            again, and if these are all, no other one is tried.
        by_rule: with "auto", whether no time may decide: the first graph that agrees is taken, of
            all replicas or of each, otherwise the loop.
    """

    name: str
    fastest_before: str | None = None
    trusted: Agreed = field(default_factory=Agreed)
    by_rule: bool = False


class BackendChoice:
    """Finds the back ends that can run a model.

    Args:
        model: what runs.
        call: arguments of a call.
        inputs: a combined micro-batch of each input.
        common: returns which of some flags, one for each back end, are set on all instances; all
            call it once.
        tell: told what happens, in a word or two.
    """

    def __init__(
        self,
        model: DeviceModel,
        call: Call,
        inputs: Sequence[torch.Tensor],
        *,
        common: Callable[[Sequence[bool]], Sequence[bool]] = list,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._call = call
        self._inputs = inputs
        self._common = common
        self._tell = tell
        self._reasons: list[str] = []
        reference = backends.BACKENDS[0]
        self._loop = reference.make(model, call, inputs)
        self._agreement = Agreement(model, call, inputs)

    def candidates(self, wanted: Wanted) -> dict[str, Replicas]:
        """Return what can run the replicas, by name: on all instances the same.

        Raises:
            Error: an option was asked for and none of its back ends can run the replicas.
        """
        loop = backends.BACKENDS[0].name
        found: dict[str, Replicas] = {}
        with self._model.state.contents_kept():
            if wanted.fastest_before is not None:
                found = self._found(wanted.fastest_before, wanted)
            if not found:
                found = self._found(wanted.name, wanted)
        is_decided = wanted.fastest_before in found or (wanted.by_rule and found)
        if wanted.name == "auto" and not is_decided:
            found[loop] = self._loop
        flags = self._common([row.name in found for row in backends.BACKENDS])
        taken = {
            row.name: found[row.name]
            for row, flag in zip(backends.BACKENDS, flags, strict=True)
            if flag
        }
        if set(taken) <= {loop}:
            self._say_why(wanted.name)
        return dict(reversed(taken.items())) or {loop: self._loop}

    def _found(self, name: str, wanted: Wanted) -> dict[str, Replicas]:
        """Return the back ends of this name or option, or with "auto" all, that agree."""
        if name == backends.BACKENDS[0].name:
            return {name: self._loop}
        found: dict[str, Replicas] = {}
        start = time.perf_counter()
        with _silent():
            alternatives = self._alternatives(name, wanted)
            are_trusted = wanted.trusted.names.issuperset(
                r.name for rows in alternatives for r in rows
            )
            for rows in alternatives:
                if found and (wanted.by_rule or time.perf_counter() - start > _ENOUGH_SECONDS):
                    break
                for row in rows:
                    replicas = self._agreeing(
                        row, is_trusted=row.name in wanted.trusted.names, are_trusted=are_trusted
                    )
                    if replicas is not None:
                        found[row.name] = replicas
                        break
        return found

    def _alternatives(self, name: str, wanted: Wanted) -> list[list[Backend]]:
        """Return the back ends to try beside the reference, those of all replicas first.

        Those of one option stand together, best first: each waits for the ones before it to fail.
        """
        possible: dict[str, list[Backend]] = {}
        for row in backends.BACKENDS[1:]:
            if name not in ("auto", row.name, row.option) or (wanted.by_rule and not row.by_rule):
                continue
            if wanted.trusted.are_all and row.name not in wanted.trusted.names:
                continue
            reason = row.can_run(self._model)
            if reason is None:
                possible.setdefault(row.option or row.name, []).append(row)
            else:
                self._reasons.append(reason)
        return list(reversed(possible.values()))

    def _agreeing(self, row: Backend, *, is_trusted: bool, are_trusted: bool) -> Replicas | None:
        """Return what runs the replicas by this back end; None if it does not agree.

        Args:
            row: the back end.
            is_trusted: whether it is not compared.
            are_trusted: whether none is: else the loop runs before any other one does.
        """
        try:
            if not (are_trusted or self._agreement.is_prepared):
                self._tell("running the loop")
                self._agreement.prepare()
            self._tell(f"making the {row.name}")
            # A vectorised forward may leave tensors in a list that no other run can read. What the
            # loop left there stays: a forward that counts in a list has to show.
            with self._model.state.contents_kept():
                with self._model.context.enter(), _collections_paused():
                    replicas = row.make(self._model, self._call, self._inputs)
                if is_trusted:
                    return replicas
                self._tell(f"checking the {row.name}")
                reason = self._agreement.difference(replicas)
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        if reason is None:
            return replicas
        logger.debug("Replica back end %s is not taken: %s", row.name, reason)
        self._reasons.append(f"{row.name}: {reason}")
        return None

    def _say_why(self, name: str) -> None:
        """Say why replicas run one after the other, if somebody may have expected more."""
        if self._model.batching.replicas == 1:
            return
        reason = "; ".join(dict.fromkeys(self._reasons))
        if name in {row.option for row in backends.BACKENDS[1:]}:
            raise Error(
                f"The replicas cannot run {name}, use 'auto' or 'loop': "
                f"{reason or 'another instance cannot'}"
            )
        if reason:
            logger.info("Replicas run one after the other: %s", reason)


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what this thread prints: trying repeats a forward that a device traces once."""
    stdout = sys.stdout
    sys.stdout = _OtherThreads(stdout)
    token = _is_silent.set(True)
    try:
        yield
    finally:
        _is_silent.reset(token)
        sys.stdout = stdout


_is_silent: Final[ContextVar[bool]] = ContextVar("is_silent", default=False)


class _OtherThreads:
    """A text stream that takes nothing from a silent thread, and from those in its context."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if _is_silent.get():
            return len(text)
        return int(self._stream.write(text))


@contextmanager
def _collections_paused() -> Iterator[None]:
    """Let Python look for cycles later than in this block.

    Capturing makes tens of thousands of objects that live on. While their number grows, Python
    looks through them and all others again and again: 6 per cent of compiling ResNet-101.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
