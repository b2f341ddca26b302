"""The Communicator protocol for communication between instances, and its implementations.

interfaces          the protocols Communicator, Meeting, HostMemory and HostLinks
communicators/      the implementations of Communicator, and joining one
within_host/        shared memory and the barrier of the instances of one host
between_hosts/      the mesh between the hosts, over TCP or MPI
arithmetic, tree    reducing arrays in a fixed order
overlaps            checks for arrays whose elements share memory
objects             exchanging Python objects as pickles
compression_rounds  the exchanges between hosts that compress their sums
signature           the description of a call, which the instances compare before they exchange data
waiting             time limits of waits, and their errors
background          the thread that runs calls in the background
size_thresholds     measured limits between two ways of reducing
freed_memory        glibc settings for freed memory

Data are NumPy arrays. This package does not use torch. Its callers pass a tensor as the array that
shares the tensor's memory.
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
