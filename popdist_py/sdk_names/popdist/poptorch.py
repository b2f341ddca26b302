"""The options of an instance, as PopDist spells them."""

from popdist_py.poptorch import DistributedOptions as Options

__all__ = ["Options"]
