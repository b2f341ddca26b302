"""The implementations of Communicator: one instance alone, MPI, shared memory.

Here live also the choice between them, and the reduction of large arrays by slices.
Nothing here opens memory or sockets itself. May call: between_hosts, within_host, collectives.
"""
