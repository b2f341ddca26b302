"""Broadcasts without a meeting: the root writes to its ring and goes on, the others read from it.

For calls that all instances have agreed on before. The invariant:

Every instance counts the *steps* that it has passed, sent and received ones alike; a step moves one
entry of the root's ring. Before an instance passes step s it publishes the code of its call for s.
An instance receives step s once its root has passed s, if the root published the same code. It
sends s once all others have passed s - ENTRIES, so nobody still reads the entry that it overwrites,
and nobody is more than ENTRIES steps apart; then it also compares what they published for the steps
that they have passed. The codes of the last 4 * ENTRIES steps stay readable.

So calls that differ are found: by a receiver at once, by a root some steps later, and by all others
at their next meeting, which compares a number made from the codes of all calls before it. An
instance that finds it comes to the next meeting with the code that no call has. So does one that
waits for an instance which waits in a meeting. Steps alone never wait for one another in a circle:
in it an instance at the lowest step would wait for one at the same step, which published another
code. In the meeting all stand still, and see in the published codes which step is the first that
differs.

Nothing here knows what a call is, but for its signature in messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from popdist_py.collectives.signature import Signature

if TYPE_CHECKING:
    from popdist_py.collectives.arithmetic import Array
    from popdist_py.collectives.within_host.host_barrier import HostBarrier

__all__ = ["BroadcastRing"]

# With fewer entries the root waits more often, with more they leave the cache. Where instances
# share cores, every wait lets all of them run in turn.
_ENTRY_BYTES = 256 * 1024
_ENTRIES, _ENTRIES_WHEN_CORES_ARE_SHORT = 4, 32
_MOST_CODES = 4 * _ENTRIES_WHEN_CORES_ARE_SHORT
# 8-byte words of an instance: the steps that it has passed, the steps that it has come to, and
# after the cache line of these two the codes.
_PASSED, _REACHED, _CODES = 0, 1, 8
_WORDS = _CODES + _MOST_CODES


class BroadcastRing:
    """What one instance sends to the others of its host, and receives from them.

    Args:
        parts: the memory of each instance's ring, of ``NUM_BYTES``.
        barrier: of these instances; its memory has ``counter_bytes`` more.
        first_word: index in ``barrier.words`` of these bytes.
        position: of this instance.
        cores_are_short: whether there are fewer cores than instances.
    """

    NUM_BYTES = _ENTRY_BYTES * _ENTRIES_WHEN_CORES_ARE_SHORT
    ENTRY_BYTES = _ENTRY_BYTES

    def __init__(
        self,
        parts: Sequence[Array],
        barrier: HostBarrier,
        first_word: int,
        position: int,
        *,
        cores_are_short: bool,
    ) -> None:
        self._num_entries = _ENTRIES_WHEN_CORES_ARE_SHORT if cores_are_short else _ENTRIES
        self._num_codes = 4 * self._num_entries
        # A root waits for multiples of it, so that receivers wake it less often.
        self._stride = self._num_entries // 4
        starts = range(0, self._num_entries * _ENTRY_BYTES, _ENTRY_BYTES)
        self._entries = [[part[start : start + _ENTRY_BYTES] for start in starts] for part in parts]
        self._own_entries = self._entries[position]
        self._barrier, self._words = barrier, barrier.words
        self._position = position
        self._lines = [first_word + _WORDS * index for index in range(len(parts))]
        self._own_line = self._lines[position]
        self._others = [index for index in range(len(parts)) if index != position]
        # The first step after the last time that calls differed, and the next one.
        self._first = self._passed = 0
        # This instance may send the steps below without looking at the others.
        self._room = 0
        self._calls: list[Signature | None] = [None] * self._num_codes

    @staticmethod
    def counter_bytes(count: int) -> int:
        """Return the bytes of the counters of ``count`` instances."""
        return 8 * _WORDS * count

    def send(self, chunk: Array, code: int, call: Signature) -> bool:
        """Give all others at most ``ENTRY_BYTES`` bytes; tell whether the calls are equal so far.

        Raises:
            InstanceLostError: the others leave no room, since one ended or did not come in time.
        """
        step = self._reach(code, call)
        if step >= self._room and not self._make_room(call):
            return False
        self._own_entries[step % self._num_entries][: chunk.size] = chunk
        self._passed = step + 1
        self._barrier.set_counter(self._own_line, step + 1)
        return True

    def receive(self, chunk: Array, root: int, code: int, call: Signature) -> bool:
        """Fill ``chunk`` with what position ``root`` sends; tell whether its call is the same.

        Raises:
            InstanceLostError: the root ended, or did not send in time.
        """
        step = self._reach(code, call)
        words, line = self._words, self._lines[root]
        published = line + _CODES + step % self._num_codes
        if words[line] <= step:

            def is_hopeless() -> bool:
                in_another_call = words[line + _REACHED] > step and words[published] != code
                return in_another_call or self._barrier.has_arrived_before(root)

            if not self._barrier.wait_for_counter(line, step + 1, root, call, is_hopeless):
                return False
        if words[published] != code:
            return False
        chunk[...] = self._entries[root][step % self._num_entries][: chunk.size]
        self._passed = step + 1
        if self._passed % self._stride:
            words[self._own_line] = self._passed
        else:
            self._barrier.set_counter(self._own_line, self._passed)
        return True

    def first_difference(self, call: Signature) -> Signature:
        """Return this instance's call at the first step that differs, while all stand still.

        Args:
            call: in which this instance has seen that the calls differ.
        """
        words = self._words
        passed = [words[line] for line in self._lines]
        first = min(passed)
        for step in range(max(self._first, max(passed) - self._num_entries), first):
            if len({self._code_of(line, step) for line in self._lines}) > 1:
                first = step
                break
        past = self._calls[first % self._num_codes] if first < self._passed else None
        return past or call

    def step_ahead_of_all(self) -> int:
        """Return a step beyond those of all: equal on all instances while they stand still."""
        return max(self._words[line] for line in self._lines) + self._num_codes

    def start_at(self, step: int) -> None:
        """Go on with a step that nobody had come to when all stood still."""
        self._first = self._room = self._passed = step
        self._barrier.set_counter(self._own_line, step)

    def _reach(self, code: int, call: Signature) -> int:
        """Publish the code of the next step, and return the step."""
        words, line, step = self._words, self._own_line, self._passed
        index = step % self._num_codes
        words[line + _CODES + index] = code
        words[line + _REACHED] = step + 1
        self._calls[index] = call
        return step

    def _make_room(self, call: Signature) -> bool:
        """Wait until about half of the ring is free; tell whether the others made equal calls."""
        words, step = self._words, self._passed
        least = (step - self._num_entries // 2) // self._stride * self._stride
        passed = [step]
        for position in self._others:
            line = self._lines[position]
            if words[line] < least and not self._barrier.wait_for_counter(
                line,
                least,
                position,
                call,
                lambda: self._barrier.has_arrived_before(position),  # noqa: B023
            ):
                return False
            passed.append(words[line])
        free = min(passed)
        for past in range(max(self._first, step - self._num_entries), free):
            code = self._code_of(self._own_line, past)
            if any(self._code_of(self._lines[peer], past) != code for peer in self._others):
                return False
        self._room = free + self._num_entries
        return True

    def _code_of(self, line: int, step: int) -> int:
        return self._words[line + _CODES + step % self._num_codes]
