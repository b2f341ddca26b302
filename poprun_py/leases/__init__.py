"""Which cores and memory of this machine its jobs hold: leases, kept by locks of the kernel.

Every job has a file in a folder that all users share, and a lock on it for its life; a job that
waits has a ticket of the same kind. A file whose lock is free belongs to nobody, however young.
Nothing here plans, or knows options. Wrappers on other hosts take leases too: all but the texts
needs the standard library alone.
May call: hardware; of the library errors.
"""
