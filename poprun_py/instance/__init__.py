"""The wrapper that mpirun starts in front of each program, on every host.

Contains binding, processes, the instance's end of the control channel, and stacks of programs.
Imports only quick modules of the standard library, because every start pays for them; on other
hosts than the launcher's, also the leases.
"""
