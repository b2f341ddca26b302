"""The implementations of Communicator: one instance alone, MPI, shared memory.

Here live also the start of MPI, the choice between them, and the all-reduce of large arrays in
slices.
Nothing here maps memory or opens sockets itself. May call: between_hosts, within_host,
collectives, environment, errors.
"""
