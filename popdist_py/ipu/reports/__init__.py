"""Reports about the memory that a model needs on IPUs, and about the time of one call.

memory_page         the report about memory
memory_over_time    the used memory of an IPU at every moment
execution_page      the report about time
tile_balance        how equally the work of an IPU is distributed over its tiles

A report can be printed as text, shown as HTML or as tables of the library rich, and converted to
JSON. No module of this package runs a model or reads options of a command.
May call: ipu, documents, searches, what_if, errors.
"""

from popdist_py.ipu.reports.execution_page import (
    ExecutionPage,
    IpuExecution,
    OperationCycles,
    execution_page,
)
from popdist_py.ipu.reports.memory_page import MemoryPage, memory_page

__all__ = [
    "ExecutionPage",
    "IpuExecution",
    "MemoryPage",
    "OperationCycles",
    "execution_page",
    "memory_page",
]
