"""The implementations of Communicator, and the functions that connect instances to make one.

``SoloCommunicator`` is for a single instance. ``GroupCommunicator`` is for several instances, which
share memory within a host and are connected by a mesh between hosts. No module of this package maps
memory or opens sockets.
May call: between_hosts, within_host, collectives, environment, errors.
"""
