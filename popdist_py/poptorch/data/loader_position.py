"""The position of a DataLoader in an epoch: the number of batches that it has returned.

The functions and classes in ``loader_position`` do not load data. The module ``dataloader.py``
saves positions and continues from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from popdist_py import activities
from popdist_py.errors import counted
from popdist_py.poptorch.logger import logger

__all__ = ["CountedBatches", "Place", "position_in"]


@dataclass(slots=True)
class Place:
    """A DataLoader's position in an epoch, which counts the batches that it has returned.

    Attributes:
        epoch: The number of epochs that began before.
        start: The state of the random generators at the start of the epoch.
        position: The number of batches of the epoch that the DataLoader has returned.
        is_complete: Whether the epoch has ended.
    """

    epoch: int
    start: dict[str, Any]
    position: int = 0
    is_complete: bool = False


class CountedBatches(Iterator[Any]):
    """An iterator over the batches of an epoch, which counts the batches that it returns."""

    def __init__(self, batches: Any, place: Place) -> None:
        self._batches = batches
        self._place = place

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            with activities.doing(activities.LOADING):
                batch = next(self._batches)
        except StopIteration:
            self._place.is_complete = True
            raise
        self._place.position += 1
        return batch


def position_in(state: Mapping[str, Any], batch_elements: int | None) -> int:
    """Return the number of a DataLoader's batches that contain the elements to skip.

    Args:
        state: A state that ``DataLoader.state_dict()`` returned, perhaps for another batch size.
        batch_elements: The number of elements that all instances together need for one call of the
            model; None if the data set yields whole batches.
    """
    position: int = state["position"]
    # States that earlier versions of DataLoader saved do not contain the key ``batch_elements``.
    before: int | None = state.get("batch_elements")
    if before is None or batch_elements is None or before == batch_elements:
        return position
    batches, rest = divmod(position * before, batch_elements)
    if rest:
        logger.warning(
            "The loaded state of the DataLoader continues after %s of an epoch, which is not a "
            "multiple of %d, the number of elements in a batch: %s read again",
            counted(position * before, "element"),
            batch_elements,
            f"{counted(rest, 'element')} {'is' if rest == 1 else 'are'}",
        )
    return batches
