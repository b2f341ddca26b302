"""All-to-all exchange between the instances of a host, with blocks of any sizes.

Every instance writes a table into its slot, which is its part of the shared memory. The table
contains the size and place of each block that the instance sends. After the table, the slot
contains the first part of each block. If a block does not fit into the slot, the instances copy the
rest of the block in further rounds, with a barrier in each round. If the kernel permits it, large
blocks are not copied to the slot: the receivers read them directly from the sender's memory. A
direct read needs one copy instead of two.

This module does not reduce arrays or connect to other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.signature import misfit
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup
from popdist_py.errors import CollectiveMismatchError

__all__ = ["HostExchange"]

# Word 0 of a table is the number of bytes of each block that are transferred in one round. Word 1
# of a table is the number of rounds. After word 1, the table has a row of three words for each
# instance of the host, called the partner here. The first two words are the size and the place in
# the slot of the block for the partner. The third word is the size of the block that the writer of
# the table expects from the partner.
_REGION, _ROUNDS, _ROWS = 0, 1, 2
_SIZE, _PLACE, _EXPECTED, _WORDS_PER_ROW = 0, 1, 2, 3
_LINE = 64
# This value in word 0 of a table means that the receivers read the blocks directly from the
# sender's memory. In a table with the value _IN_PLACE, each place is the address of a block.
_IN_PLACE = 0
# For blocks of more bytes than this, direct reads are faster than copies through the slots.
_MIN_READ_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _BlockTransfer:
    """The transfer of a block through a slot.

    Attributes:
        position: Position, on the host, of the other instance that sends or receives the block.
        block: The bytes of the block, or the memory that receives them.
        place: The offset in the sender's slot at which the parts of this block are stored.
        region: The size in bytes of the part that one round transfers.
    """

    position: int
    block: Array
    place: int
    region: int

    def part(self, number: int) -> Array:
        """Return the part of the block that is transferred in round ``number``."""
        return self.block[number * self.region : (number + 1) * self.region]

    def put(self, number: int, slot: Array) -> None:
        """Copy the part for round ``number`` from the block into this instance's ``slot``."""
        part = self.part(number)
        slot[self.place : self.place + part.size] = part

    def take(self, number: int, slot: Array) -> None:
        """Copy the part for round ``number`` from the sender's ``slot`` into the block."""
        part = self.part(number)
        part[...] = slot[self.place : self.place + part.size]


class HostExchange:
    """Exchanges blocks between the instances of a host.

    Args:
        host: The instances of the host.
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
        """Fill item i of ``receives`` with the bytes from the instance at position i.

        Args:
            sends: One array with the bytes for each instance of the host. If this instance does not
                send, ``sends`` is empty.
            receives: One array for the bytes from each instance of the host. If this instance does
                not receive, ``receives`` is empty.
            plan: Plan of the call.

        Raises:
            CollectiveMismatchError: The sender and the receiver of a block pass arrays of different
                sizes, and both raise this error. Blocks with equal sizes are still transferred.
        """
        host, own = self._host, self._host.position
        turn = host.next_turn()
        leaving = self._publish(self._tables[turn][own], sends, receives)
        for transfer in leaving:
            transfer.put(0, host.slots[turn][own])
        host.wait_for_same_call(plan, turn)
        # Read the tables completely before the rounds, because other instances may overwrite their
        # slots in later rounds.
        rounds = max(table[_ROUNDS] for table in self._tables[turn])
        problem = self._first_problem(turn, plan)
        arriving = self._arriving(turn, receives)
        in_place = self._in_place(turn, receives)
        kept = self._kept(sends, receives, rounds)
        for number in range(rounds):
            if number:
                turn = host.next_turn()
                for transfer in leaving:
                    transfer.put(number, host.slots[turn][own])
                host.barrier.wait_for_all(plan.signature)
            for transfer in arriving:
                transfer.take(number, host.slots[turn][transfer.position])
            for target, source in kept:
                target.part(number)[...] = source.part(number)
        if in_place is not None:
            for position, address in in_place:
                host.read(position, address, receives[position], plan)
            # Wait until all blocks have been read, because after this call the senders may change
            # their blocks.
            host.barrier.wait_for_all(plan.signature)
        if problem is not None:
            raise problem

    def _kept(
        self, sends: Sequence[Array], receives: Sequence[Array], rounds: int
    ) -> list[tuple[_BlockTransfer, _BlockTransfer]]:
        """Return the target and the source of the block that this instance sends to itself.

        The list is empty if this instance does not send or does not receive, or if the sizes of
        source and target differ.
        """
        own = self._host.position
        if not (sends and receives and sends[own].size == receives[own].size):
            return []
        region = -(-sends[own].size // rounds)
        return [
            (
                _BlockTransfer(own, receives[own], 0, region),
                _BlockTransfer(own, sends[own], 0, region),
            )
        ]

    def _publish(
        self, table: memoryview, sends: Sequence[Array], receives: Sequence[Array]
    ) -> list[_BlockTransfer]:
        """Write this instance's table; return the transfers of its blocks to other instances."""
        own, count = self._host.position, self._host.size
        capacity = self._host.slot_bytes - self._data_start
        sizes = [block.size for block in sends] or [0] * count
        expected = [block.size for block in receives] or [0] * count
        others = [size for position, size in enumerate(sizes) if size and position != own]
        longest = max(others, default=0)
        if self._host.can_read and longest > _MIN_READ_BYTES:
            return self._publish_in_place(table, sends, expected)
        # If all blocks together fit into the slot, they are stored without gaps.
        fits = sum(others) <= capacity
        region = max(longest, 1) if fits else capacity // len(others) // _LINE * _LINE
        table[_REGION], table[_ROUNDS] = region, max(1, -(-longest // region))
        place, row, leaving = self._data_start, _ROWS, []
        for position, size in enumerate(sizes):
            table[row + _SIZE], table[row + _EXPECTED] = size, expected[position]
            if size and position != own:
                table[row + _PLACE] = place
                leaving.append(_BlockTransfer(position, sends[position], place, region))
                place += size if fits else region
            row += _WORDS_PER_ROW
        return leaving

    @staticmethod
    def _publish_in_place(
        table: memoryview, sends: Sequence[Array], expected: Sequence[int]
    ) -> list[_BlockTransfer]:
        """Write this instance's table for blocks that the receivers read directly from its memory.

        The returned list is empty, because no block is transferred through a slot.
        """
        table[_REGION], table[_ROUNDS] = _IN_PLACE, 1
        row = _ROWS
        for block, size in zip(sends, expected, strict=True):
            table[row + _SIZE], table[row + _EXPECTED] = block.size, size
            table[row + _PLACE] = block.ctypes.data
            row += _WORDS_PER_ROW
        return []

    def _in_place(self, turn: int, receives: Sequence[Array]) -> list[tuple[int, int]] | None:
        """Return the sender's position and the address of each block that is read directly.

        The result is None if all instances send their blocks through slots.
        """
        if all(table[_REGION] != _IN_PLACE for table in self._tables[turn]):
            return None
        row, found = self._row(self._host.position), []
        for position in self._host.others() if receives else ():
            table = self._tables[turn][position]
            if table[_REGION] == _IN_PLACE and receives[position].size == table[row + _SIZE]:
                found.append((position, table[row + _PLACE]))
        return found

    def _arriving(self, turn: int, receives: Sequence[Array]) -> list[_BlockTransfer]:
        """Return the blocks that this instance receives through slots.

        The senders are in the order of their positions, starting after this instance's position.
        """
        arriving, row = [], self._row(self._host.position)
        for position in self._host.others() if receives else ():
            table, block = self._tables[turn][position], receives[position]
            is_here = table[_REGION] != _IN_PLACE
            if is_here and block.size and table[row + _SIZE] == block.size:
                arriving.append(
                    _BlockTransfer(position, block, table[row + _PLACE], table[_REGION])
                )
        return arriving

    def _first_problem(self, turn: int, plan: CallPlan) -> CollectiveMismatchError | None:
        """Return the error for the first wrong block size among this instance's transfers.

        The result is None if all sizes are as expected.
        """
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
