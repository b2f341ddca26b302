"""Which cores and memory of this machine its jobs hold: leases, kept by locks of the kernel.

Nothing here plans, or knows options.
May call: errors.
"""
