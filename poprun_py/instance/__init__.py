"""What runs in front of each program: the wrapper that mpirun starts on every host.

Here live binding, processes, the instance's end of the control channel, and its stacks.
Nothing here imports more than the standard library's quickest parts: every start pays for it.
May call: own_host, and leases (on another host than the launcher's), no other room.
"""
