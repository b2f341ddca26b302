"""The types that programs use in annotations, re-exported from popdist_py."""

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
