"""Communication between instances: the Communicator protocol and its implementations.

interfaces        the protocols: Communicator, Meeting, and what a Communicator may offer
communicators/    the implementations of Communicator, and how instances join one
within_host/      the memory that instances of one host share, and the barrier in it
between_hosts/    the mesh between the hosts, over TCP or MPI
arithmetic, tree  reducing arrays in a fixed order
objects           Python objects, which travel as pickles
compression_rounds  the exchanges between hosts that compress their sums
signature         what the instances compare before they exchange data
waiting           the limits of waits, and their errors
background        calls that run beside the program
size_thresholds   measured limits between two ways of reducing
freed_memory      whether glibc keeps what a step frees for the next one

Data are NumPy arrays. torch stays outside: a tensor reaches this package as the array that shares
its memory.
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
