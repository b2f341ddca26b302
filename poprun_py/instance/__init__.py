"""The wrapper that mpirun starts in front of each program, on every host.

It binds itself to CPUs, starts the program, and sends the program's output, progress and end to the
launcher. It imports only quick modules of the standard library, because every start waits for them.
On other hosts than the launcher's, it also imports the leases.
"""
