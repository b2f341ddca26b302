"""The group ``Options.TensorLocations`` and the class ``TensorLocationSettings``."""

from __future__ import annotations

from typing import TypeVar

from popdist_py.poptorch.options.store import OptionStore

__all__ = ["TensorLocationSettings", "_TensorLocationOptions"]

_Location = TypeVar("_Location", bound="TensorLocationSettings")


class TensorLocationSettings:
    """The location of one kind of tensors, such as weights, in the memory of the device.

    The memory location of tensors affects the emulated memory and time, but not the results.
    """

    def __init__(self, **values: int) -> None:
        self._content: dict[str, int] = dict(values)

    def _put(self: _Location, name: str, value: int, kind: type) -> _Location:
        assert isinstance(value, kind), (
            f"TensorLocationSettings got the value {value!r} for {name}: expected {kind.__name__}"
        )
        self._content[name] = int(value)
        return self

    def useOnChipStorage(self, use: bool | None = True) -> TensorLocationSettings:
        """Store the tensors inside (True) or outside (False) the IPU's memory; None undoes this."""
        if use is None:
            self._content.pop("onChip", None)
            return self
        return self._put("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Split each tensor into shards (parts), and store one shard on each replica."""
        return self._put("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through tiles (IPU cores) that are reserved for input and output.

        The setting ``useIOTilesToLoad`` has no effect in the emulation.
        """
        return self._put("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through tiles (IPU cores) that are reserved for input and output.

        The setting ``useIOTilesToStore`` has no effect in the emulation.
        """
        return self._put("useIOTilesToStore", use, bool)

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep tensors with fewer than ``min_elements`` elements in the IPU's own memory."""
        return self._put("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not split tensors with fewer than ``min_elements`` elements into shards."""
        return self._put("minElementsForReplicatedTensorSharding", min_elements, int)

    def toDict(self) -> dict[str, int]:
        """Return the settings that a program has set for the location of one kind of tensors."""
        return dict(self._content)

    def __repr__(self) -> str:
        return f"TensorLocationSettings({', '.join(f'{k}={v}' for k, v in self._content.items())})"


class _TensorLocationOptions(OptionStore):
    """The memory locations of activations, weights, optimiser state and accumulators."""

    def _locate(self, name: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), (
            f"{name} got the value {location!r}: expected a poptorch.TensorLocationSettings"
        )
        self.createOrSet(**{name: location.toDict()})
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory location of activations."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory location of weights."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory location of the optimiser's state."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory location of gradient accumulators."""
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Reserve an even number of tiles (IPU cores), from 32 to 192, for input and output."""
        assert isinstance(num_tiles, int), (
            f"numIOTiles({num_tiles!r}) is not valid: expected a whole number"
        )
        assert 32 <= num_tiles <= 192, (
            f"numIOTiles({num_tiles}) is not valid: expected 32 to 192 tiles"
        )
        assert num_tiles % 2 == 0, f"numIOTiles({num_tiles}) is not valid: expected an even number"
        self.createOrSet(numIOTiles=num_tiles)
        return self
