"""The types that programs name in annotations: every object is that of popdist_py."""

from popdist_py.poptorch import (
    AsynchronousDataAccessor,
    Attribute,
    DataLoader,
    ICustomArgParser,
    Options,
    PoplarExecutor,
    TensorLocationSettings,
)

__all__ = [
    "AsynchronousDataAccessor",
    "Attribute",
    "DataLoader",
    "ICustomArgParser",
    "Options",
    "PoplarExecutor",
    "TensorLocationSettings",
]
