"""PopDist's class ``Options``, the PopTorch options of an instance of a job."""

from popdist_py.poptorch import DistributedOptions as Options

__all__ = ["Options"]
