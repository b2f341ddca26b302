"""The implementations of Communicator, and the functions to join one.

A communicator has a single instance, or several instances that share memory within a host and are
connected by a mesh between hosts. This package does not map memory or open sockets itself. It may
call between_hosts, within_host, collectives, environment and errors.
"""
