"""Horovod under its own name. PyTorch programs use ``horovod.torch``."""

from typing import TYPE_CHECKING

# The package implements the API of this version of Horovod. Some programs check the version.
__version__ = "0.28.1"

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in ("run", "run_elastic"):
            raise AttributeError(
                f"Horovod's {name} is not available in popdist_py: start the program with "
                "poprun-py, or start a function with poprun_py.launch"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
