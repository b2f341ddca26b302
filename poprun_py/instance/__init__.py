"""The wrapper that mpirun starts in front of each program, on every host.

The wrapper binds itself to CPUs and starts the program. The wrapper sends the program's output and
progress to the launcher, and reports how the program ended. The wrapper imports only standard
modules that load quickly, because their import delays the start of every instance. On hosts other
than the launcher's, the wrapper also imports the module for leases of CPUs.
"""
