"""Connections with other hosts: who is of the job, and what becomes of everybody else.

greeting        what two ends say to show that they know the secret, as bytes
gate            those who connect, until they have shown it
calls           those whom this process connects to, until they have
silence         whether the host at the other end still answers

Nothing here knows what is said afterwards, or chooses an address: the standard library alone.
May call: no other room.
"""
