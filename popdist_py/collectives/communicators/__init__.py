"""The implementations of Communicator, and how instances join one.

A communicator connects one instance alone, or several that share memory within a host and are
connected by a mesh between hosts.
Nothing here maps memory or opens sockets itself. May call: between_hosts, within_host,
collectives, environment, errors.
"""
