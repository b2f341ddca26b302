"""Blocks of any sizes from each instance of a host to each other one, through their slots.

Every instance publishes a table in its slot, which says how large its blocks are and where they
lie; the first part of each follows it. Larger blocks take further rounds, one meeting each. Those
that are much larger stay where they are, and are read there: one copy in place of two.

Nothing here reduces, or knows other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.signature import misfit
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup
from popdist_py.errors import CollectiveMismatchError

__all__ = ["HostExchange"]

# Words of a table: bytes of a block that travel in one round, number of rounds; then for each
# instance the size of its block, where it lies in the slot, and how much is expected from it.
_REGION, _ROUNDS, _ROWS = 0, 1, 2
_SIZE, _PLACE, _EXPECTED, _WORDS_PER_ROW = 0, 1, 2, 3
_LINE = 64
# In place of the bytes of a round: the blocks are read from the memory of their instance, and the
# table says where they lie there.
_IN_PLACE = 0
# The size of a block above which that is faster.
_MIN_READ_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Passage:
    """How a block travels through a slot.

    Attributes:
        position: of the instance that sends or receives it.
        block: its bytes, or the place for them.
        place: where its parts lie in the slot of the sender.
        region: bytes of a part.
    """

    position: int
    block: Array
    place: int
    region: int

    def part(self, number: int) -> Array:
        """Return the bytes that travel in a round."""
        return self.block[number * self.region : (number + 1) * self.region]

    def put(self, number: int, slot: Array) -> None:
        """Copy the part of a round into the own slot."""
        part = self.part(number)
        slot[self.place : self.place + part.size] = part

    def take(self, number: int, slot: Array) -> None:
        """Copy the part of a round from the slot of the sender."""
        part = self.part(number)
        part[...] = slot[self.place : self.place + part.size]


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
                one of the two. The other blocks arrive.
        """
        host, own = self._host, self._host.position
        turn = host.next_turn()
        leaving = self._publish(self._tables[turn][own], sends, receives)
        for passage in leaving:
            passage.put(0, host.slots[turn][own])
        host.wait_for_same_call(plan, turn)
        # All of a table is read now: soon its instance may use the slot for another call.
        rounds = max(table[_ROUNDS] for table in self._tables[turn])
        problem = self._first_problem(turn, plan)
        arriving = self._arriving(turn, receives)
        in_place = self._in_place(turn, receives)
        kept = self._kept(sends, receives, rounds)
        for number in range(rounds):
            if number:
                turn = host.next_turn()
                for passage in leaving:
                    passage.put(number, host.slots[turn][own])
                host.barrier.wait_for_all(plan.signature)
            for passage in arriving:
                passage.take(number, host.slots[turn][passage.position])
            for target, source in kept:
                target.part(number)[...] = source.part(number)
        if in_place is not None:
            for position, address in in_place:
                host.read(position, address, receives[position], plan)
            host.barrier.wait_for_all(plan.signature)  # nobody changes before what others read
        if problem is not None:
            raise problem

    def _kept(
        self, sends: Sequence[Array], receives: Sequence[Array], rounds: int
    ) -> list[tuple[_Passage, _Passage]]:
        """Return how the own block stays: a part in each round, while others may fill their slots.

        No pair if this instance sends or receives nothing, or if the block does not fit.
        """
        own = self._host.position
        if not (sends and receives and sends[own].size == receives[own].size):
            return []
        region = -(-sends[own].size // rounds)
        return [(_Passage(own, receives[own], 0, region), _Passage(own, sends[own], 0, region))]

    def _publish(
        self, table: memoryview, sends: Sequence[Array], receives: Sequence[Array]
    ) -> list[_Passage]:
        """Write the own table, and return how the blocks for others leave."""
        own, count = self._host.position, self._host.size
        capacity = self._host.slot_bytes - self._data_start
        sizes = [block.size for block in sends] or [0] * count
        expected = [block.size for block in receives] or [0] * count
        others = [size for position, size in enumerate(sizes) if size and position != own]
        longest = max(others, default=0)
        if self._host.can_read and longest > _MIN_READ_BYTES:
            return self._publish_in_place(table, sends, expected)
        # Where all fit, they lie close together.
        fits = sum(others) <= capacity
        region = max(longest, 1) if fits else capacity // len(others) // _LINE * _LINE
        table[_REGION], table[_ROUNDS] = region, max(1, -(-longest // region))
        place, row, leaving = self._data_start, _ROWS, []
        for position, size in enumerate(sizes):
            table[row + _SIZE], table[row + _EXPECTED] = size, expected[position]
            if size and position != own:
                table[row + _PLACE] = place
                leaving.append(_Passage(position, sends[position], place, region))
                place += size if fits else region
            row += _WORDS_PER_ROW
        return leaving

    @staticmethod
    def _publish_in_place(
        table: memoryview, sends: Sequence[Array], expected: Sequence[int]
    ) -> list[_Passage]:
        """Write a table of blocks that others read where they lie; none leaves."""
        table[_REGION], table[_ROUNDS] = _IN_PLACE, 1
        row = _ROWS
        for block, size in zip(sends, expected, strict=True):
            table[row + _SIZE], table[row + _EXPECTED] = block.size, size
            table[row + _PLACE] = block.ctypes.data
            row += _WORDS_PER_ROW
        return []

    def _in_place(self, turn: int, receives: Sequence[Array]) -> list[tuple[int, int]] | None:
        """Return the positions whose blocks for this instance are to be read, and where they lie.

        None if nobody's blocks are read.
        """
        if all(table[_REGION] != _IN_PLACE for table in self._tables[turn]):
            return None
        row, found = self._row(self._host.position), []
        for position in self._host.others() if receives else ():
            table = self._tables[turn][position]
            if table[_REGION] == _IN_PLACE and receives[position].size == table[row + _SIZE]:
                found.append((position, table[row + _PLACE]))
        return found

    def _arriving(self, turn: int, receives: Sequence[Array]) -> list[_Passage]:
        """Return how blocks that fit come from others, beginning with the next position."""
        arriving, row = [], self._row(self._host.position)
        for position in self._host.others() if receives else ():
            table, block = self._tables[turn][position], receives[position]
            is_here = table[_REGION] != _IN_PLACE
            if is_here and block.size and table[row + _SIZE] == block.size:
                arriving.append(_Passage(position, block, table[row + _PLACE], table[_REGION]))
        return arriving

    def _first_problem(self, turn: int, plan: CallPlan) -> CollectiveMismatchError | None:
        """Return the error for a block to or from this instance that its place does not fit."""
        own, instances, tables = self._host.position, self._host.instances, self._tables[turn]
        mine, back = tables[own], self._row(own)
        for position, other in enumerate(tables):
            row = self._row(position)
            pairs = (
                (position, own, other[back + _SIZE], mine[row + _EXPECTED]),
                (own, position, mine[row + _SIZE], other[back + _EXPECTED]),
            )
            for sender, receiver, sent, expected in pairs:
                if sent != expected:
                    names, from_to = self._host.names, (instances[sender], instances[receiver])
                    return misfit(plan.signature, names, from_to[0], sent, from_to[1], expected)
        return None

    @staticmethod
    def _row(position: int) -> int:
        return _ROWS + _WORDS_PER_ROW * position
