"""The implementations of Communicator, and the functions to join one.

A communicator has a single instance, or several instances that share memory within a host and are
connected by a mesh between hosts. No module of this package maps memory or opens sockets.
May call: between_hosts, within_host, collectives, environment, errors.
"""
