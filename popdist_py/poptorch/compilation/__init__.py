"""From a module, options and example arguments to a compiled program.

Here live the compiler, the choice of a replica back end, what training adds, and the cache.
Nothing here runs a step. May call: execution, update, weights, options,
placement, calls, enums, logger, errors, and the library's collectives and environment.
"""
