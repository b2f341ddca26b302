"""The Communicator protocol for communication between instances, and its implementations.

interfaces          the protocols Communicator, Meeting, HostMemory and HostLinks
communicators/      the implementations of Communicator, and joining one
within_host/        shared memory and the barrier of the instances of one host
between_hosts/      the exchange of data between hosts, over TCP or MPI
arithmetic, tree    reducing arrays in a fixed order
overlaps            checks for arrays whose elements share memory
objects             exchanging Python objects as pickles
compression_rounds  the exchanges of compressed arrays between hosts
signature           the description of a call, which the instances compare before they exchange data
waiting             time limits of waits, and their errors
background          the thread that runs calls in the background
size_thresholds     the largest array size for one-shot reductions, measured once per machine
freed_memory        glibc settings for freed memory

Collective calls take and return NumPy arrays. This package does not import torch: to reduce a
tensor, other packages pass a NumPy array that shares the tensor's memory.
"""

from popdist_py.collectives.interfaces import (
    AnyReduceOp,
    Communicator,
    HostLinks,
    HostMemory,
    Meeting,
    ReduceOp,
)

__all__ = ["AnyReduceOp", "Communicator", "HostLinks", "HostMemory", "Meeting", "ReduceOp"]
