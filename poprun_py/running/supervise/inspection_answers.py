"""Answers to processes that inspect the job, sent as fast as the processes read them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from poprun_py.instance import control_protocol

# An answer is dropped if the inspecting process has read nothing for this long.
_READER_SECONDS = 5.0
# The longest wait at the end of the job for a process that has not read its whole answer.
_LAST_READ_SECONDS = 1.0


@dataclass(slots=True)
class _Answer:
    """The unsent bytes of one answer, and the time when the inspecting process last read some."""

    unsent: memoryview
    read_at: float


class InspectionAnswers:
    """Sends answers to inspecting processes, and closes each connection after its answer.

    Args:
        selector: Tells when a connection can take more bytes.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._answers: dict[socket.socket, _Answer] = {}

    def send(self, channel: socket.socket, text: str) -> None:
        """Begin to send an answer, in one or more frames."""
        data = text.encode()
        size = control_protocol.MAX_PAYLOAD
        parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        frames = b"".join(control_protocol.pack(control_protocol.STACKS, part) for part in parts)
        self._answers[channel] = _Answer(memoryview(frames), time.monotonic())
        self._selector.register(channel, selectors.EVENT_WRITE, self._continue)
        self._continue(channel, selectors.EVENT_WRITE)

    def drop_unread(self, now: float) -> None:
        """Close the connections of processes that have read nothing for too long."""
        for channel, answer in tuple(self._answers.items()):
            if now > answer.read_at + _READER_SECONDS:
                self._end(channel)

    def close(self) -> None:
        """Send the rest of each answer if it is read at once, and close all connections."""
        for channel, answer in tuple(self._answers.items()):
            with contextlib.suppress(OSError):
                channel.settimeout(_LAST_READ_SECONDS)
                channel.sendall(answer.unsent)
            self._end(channel)

    def _continue(self, channel: Any, _: int) -> None:
        answer = self._answers[channel]
        try:
            while answer.unsent:
                answer.unsent = answer.unsent[channel.send(answer.unsent) :]
                answer.read_at = time.monotonic()
        except BlockingIOError:
            return
        except OSError:  # the inspecting process has closed it
            pass
        self._end(channel)

    def _end(self, channel: socket.socket) -> None:
        del self._answers[channel]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()
