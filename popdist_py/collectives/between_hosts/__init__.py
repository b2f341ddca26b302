"""The instances of several hosts: MPI that does not wait for ever, and sockets.

Here live polled MPI calls and the ring over TCP, with the connecting of it.
Nothing here knows shared memory. May call: within_host (its rendezvous), the arithmetic.
"""
