"""From a module, options and example arguments to a compiled program.

Here are the compiler, the choice of the replica back ends, what training adds, and the cache.
Nothing here runs a step.
May call: on_ipu, execution, replica_graphs, update, compressed, weights, options, placement,
tracing, calls, group_norms, enums, logger, errors, and the library's collectives, atomic_file,
environment, ipu, own_files and timeline.
"""
