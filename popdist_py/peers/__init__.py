"""Authenticated connections between the processes of a job.

greeting        the handshake, in which both ends prove that they know the secret
gate            accepts connections, and authenticates their callers
calls           connects to other processes, and authenticates them
silence         tells whether the host at the other end still answers

No module of this package chooses addresses or defines messages after the handshake, because the
callers do this. The package uses the standard library only.
May call: none.
"""
