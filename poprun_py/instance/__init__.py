"""What runs in front of each program: the wrapper that mpirun starts on every host.

Here live binding, processes, the instance's end of the control channel, and its stacks.
Standard library only, cheap to import: every start pays. May call: nothing of ours.
"""
