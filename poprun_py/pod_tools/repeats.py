"""Requests that are sent twice because an answer was lost: done once, answered twice.

Nothing here knows what a request is about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from popdist_py.pods.errors import InvalidRequestError

# Longer than any client repeats a request, and about 30 KB each at most.
_KEPT_SECONDS: Final = 300.0
_MOST_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    what: bytes
    since: float
    answer: Future[bytes]


class Repeats:
    """The answers to the last requests that changed something, by user and request id.

    A repeat gets the answer, or the error, of the first; it waits where that is still under way.
    They are forgotten when the server ends: what was done right before that is done twice then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], _Known] = {}

    def once(self, user: str, request_id: str, what: bytes, act: Callable[[], bytes]) -> bytes:
        """Return what ``act`` returns, or has returned for the same request.

        Raises:
            InvalidRequestError: the id was that of another request.
        """
        key = user, request_id
        own = _Known(what, time.monotonic(), Future())
        with self._lock:
            self._forget_old(own.since)
            known = self._known.setdefault(key, own)
        if known is not own:
            if known.what != what:
                raise InvalidRequestError("this request id was another request's: choose a new one")
            return known.answer.result()
        try:
            own.answer.set_result(act())
        except Exception as error:
            own.answer.set_exception(error)
        return own.answer.result()

    def _forget_old(self, now: float) -> None:
        for key, known in list(self._known.items()):  # the oldest first
            is_old = now - known.since > _KEPT_SECONDS or len(self._known) >= _MOST_KEPT
            if not is_old:
                break
            if known.answer.done():
                del self._known[key]
