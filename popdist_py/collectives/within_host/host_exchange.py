"""Blocks of any sizes from each instance of a host to each other one.

Every instance publishes a table in its slot: where its blocks lie, and where those it receives
belong. Small blocks lie in the slot as well. Larger ones are copied from process to process, by
whichever of the two has less to do; or they pass through the slots, where memory cannot be read.

Nothing here reduces, or knows other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup, exposed
from popdist_py.errors import CollectiveMismatchError

__all__ = ["HostExchange"]

# Words of a table: the bytes for others, the bytes from others, and whether the blocks for others
# lie in the slot; then for each instance its block, and the place of what it sends.
_OUT, _IN, _IS_INLINE, _ROWS = 0, 1, 2, 4
_SEND_PLACE, _SEND_SIZE, _RECEIVE_ADDRESS, _RECEIVE_SIZE, _WORDS_PER_ROW = 0, 1, 2, 3, 4
# Up to this many bytes for others, two copies through the slot are faster than one from process to
# process, after which all instances meet again.
_INLINE_BYTES = 128 * 1024
_LINE = 64


class HostExchange:
    """Exchanges blocks between the instances of a host.

    Args:
        host: the instances.
    """

    def __init__(self, host: HostGroup) -> None:
        self._host = host
        words = _ROWS + _WORDS_PER_ROW * host.size
        self._data_start = -(-8 * words // _LINE) * _LINE
        self._tables = [
            [memoryview(slot[: 8 * words]).cast("q") for slot in slots]  # type: ignore[arg-type]
            for slots in host.slots
        ]

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], plan: CallPlan) -> None:
        """Fill block i of ``receives`` with what position i sends to this one.

        Args:
            sends: bytes for each position; none at all from one that sends nothing.
            receives: bytes from each position; none at all at one that receives nothing.
            plan: of the call.

        Raises:
            CollectiveMismatchError: a block and its place differ in size; also raised by the other
                one of the two. Nobody else waits for them.
        """
        host, own = self._host, self._host.position
        turn = host.next_turn()
        tables = self._tables[turn]
        self._publish(tables[own], host.slots[turn][own], sends, receives)
        with exposed(receives) if tables[own][_IN] > _INLINE_BYTES else nullcontext():
            host.wait_for_same_call(plan, turn)
            problem = self._first_problem(tables, plan)
            if sends and receives and sends[own].size == receives[own].size:
                receives[own][...] = sends[own]
            for position in host.others():
                if tables[position][_IS_INLINE]:
                    self._take(position, turn, receives)
            if not all(table[_IS_INLINE] for table in tables):
                if host.can_read:
                    self._copy_directly(tables, sends, receives, plan)
                    host.barrier.wait_for_all(plan.signature)
                else:
                    self._pass_through_slots(tables, sends, receives, plan)
        if problem:
            raise CollectiveMismatchError(problem)

    def _publish(
        self, table: memoryview, slot: Array, sends: Sequence[Array], receives: Sequence[Array]
    ) -> None:
        """Write the own table, and blocks that are small."""
        own = self._host.position
        out_sizes = [block.size for block in sends] or [0] * self._host.size
        in_sizes = [block.size for block in receives] or [0] * self._host.size
        table[_OUT], table[_IN] = sum(out_sizes) - out_sizes[own], sum(in_sizes) - in_sizes[own]
        limit = min(_INLINE_BYTES, slot.size - self._data_start)
        table[_IS_INLINE] = is_inline = table[_OUT] <= limit
        # Others write here only if they send less than this one receives.
        is_written = table[_IN] > limit
        place, row = self._data_start, _ROWS
        for position, (size, in_size) in enumerate(zip(out_sizes, in_sizes, strict=True)):
            table[row + _SEND_SIZE], table[row + _RECEIVE_SIZE] = size, in_size
            if position != own:
                if is_inline and size:
                    slot[place : place + size] = sends[position]
                    table[row + _SEND_PLACE] = place
                    place += size
                elif size:
                    table[row + _SEND_PLACE] = sends[position].ctypes.data
                if is_written:
                    table[row + _RECEIVE_ADDRESS] = receives[position].ctypes.data
            row += _WORDS_PER_ROW

    def _take(self, position: int, turn: int, receives: Sequence[Array]) -> None:
        """Copy the block from the slot of a position."""
        table, row = self._tables[turn][position], self._row(self._host.position)
        size = table[row + _SEND_SIZE]
        if size and receives and receives[position].size == size:
            place = table[row + _SEND_PLACE]
            receives[position][...] = self._host.slots[turn][position][place : place + size]

    def _copy_directly(
        self,
        tables: Sequence[memoryview],
        sends: Sequence[Array],
        receives: Sequence[Array],
        plan: CallPlan,
    ) -> None:
        """Copy blocks between this process and others, those that are this one's to copy."""
        host, own = self._host, self._host.position
        mine = tables[own]
        for position in host.others():
            other = tables[position]
            row, back = self._row(position), self._row(own)
            if not other[_IS_INLINE] and mine[_IN] <= other[_OUT]:
                size = other[back + _SEND_SIZE]
                if size and size == mine[row + _RECEIVE_SIZE]:
                    host.read(position, other[back + _SEND_PLACE], receives[position], plan)
            if not mine[_IS_INLINE] and other[_IN] > mine[_OUT]:
                size = mine[row + _SEND_SIZE]
                if size and size == other[back + _RECEIVE_SIZE]:
                    block, address = sends[position], other[back + _RECEIVE_ADDRESS]
                    host.write_bytes(position, address, block.ctypes.data, size)

    def _pass_through_slots(
        self,
        tables: Sequence[memoryview],
        sends: Sequence[Array],
        receives: Sequence[Array],
        plan: CallPlan,
    ) -> None:
        """Copy blocks that are not inline through the slots, a region of them for each receiver."""
        host, own = self._host, self._host.position
        rows = [self._row(position) for position in range(host.size)]
        # Another one may reuse its table as soon as it has passed the last meeting.
        inline = [bool(table[_IS_INLINE]) for table in tables]
        sizes = [table[rows[own] + _SEND_SIZE] for table in tables]
        longest = max(
            table[row + _SEND_SIZE]
            for table, is_inline in zip(tables, inline, strict=True)
            for row in rows
            if not is_inline
        )
        region = host.slot_bytes // host.size
        for start in range(0, longest, region):
            turn = host.next_turn()
            for position, block in enumerate(sends):
                if position != own and not inline[own]:
                    part = block[start : start + region]
                    first = position * region
                    host.slots[turn][own][first : first + part.size] = part
            host.barrier.wait_for_all(plan.signature)
            for position, block in enumerate(receives):
                if position != own and not inline[position] and sizes[position] == block.size:
                    part = block[start : start + region]
                    first = own * region
                    part[...] = host.slots[turn][position][first : first + part.size]

    def _first_problem(self, tables: Sequence[memoryview], plan: CallPlan) -> str:
        """Say which block to or from this instance differs in size from its place; "" if none."""
        own, names = self._host.position, self._host.names.of
        instances = self._host.instances
        mine, back = tables[own], self._row(own)
        for position, other in enumerate(tables):
            row = self._row(position)
            pairs = (
                (position, own, other[back + _SEND_SIZE], mine[row + _RECEIVE_SIZE]),
                (own, position, mine[row + _SEND_SIZE], other[back + _RECEIVE_SIZE]),
            )
            for sender, receiver, sent, expected in pairs:
                if sent != expected:
                    return (
                        f"{plan.signature}: {names(instances[sender])} sends {sent} bytes to "
                        f"{names(instances[receiver])}, which expects {expected}"
                    )
        return ""

    @staticmethod
    def _row(position: int) -> int:
        return _ROWS + _WORDS_PER_ROW * position
