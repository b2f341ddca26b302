"""Messages between two ranks of a group (``send`` and ``recv``), independent of its collectives.

messages        the protocol of send and receive
message_work    the work object of one send or receive
message_errors  texts of errors for failed sends and receives
mailbox         matches each message with a receive
traffic         sends and receives headers and bytes over all connections
channels        one connection between two ranks
endpoint        addresses of the ranks, and connections between them

No module of this folder calls a collective.
May call: between_hosts, within_host, communicators, collectives, peers, activities, environment,
errors, public_collectives, membership.
"""
