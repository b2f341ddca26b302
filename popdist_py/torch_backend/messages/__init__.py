"""Messages between two ranks of a group, beside its collectives.

messages        send and receive: what is sent, and which receive gets it
message_work    one send or receive, which its caller waits for
message_errors  why one could not be
mailbox         which message a receive gets
traffic         what moves headers and bytes to and from the other ranks
channels        one connection between two ranks
endpoint        where a rank is reached

Nothing here knows collectives. May call: between_hosts, within_host, communicators, collectives,
peers, activities, environment, errors, public_collectives, membership.
"""
