"""The wrapper that mpirun starts in front of each program, on every host.

It binds itself to CPUs, starts the program, and talks to the launcher: of the program's output, its
progress and its end. It imports only quick modules of the standard library, because every start
waits for them, and on other hosts than the launcher's also the leases.
"""
