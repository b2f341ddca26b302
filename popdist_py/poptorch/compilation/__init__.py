"""The compilation of a model, with its options and example arguments, to a program for IPUs.

The package contains the compiler, the choice of the replica back end (the code that runs the
replicas), the setup of training, and the cache of executables (stored compiled models).
No module of this package runs a training step.
May call: on_ipu, execution, replica_graphs, update, compressed, weights, options, placement,
tracing, calls, group_norms, enums, logger, errors, and the library's collectives, atomic_file,
environment, ipu, ipu.runs, ipu.searches, own_files and timeline.
"""
