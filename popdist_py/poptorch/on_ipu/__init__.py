"""The memory and the time that a model would need on an IPU.

The package ``poptorch.on_ipu`` converts the forward pass of a PopTorch model to a graph of
operations. The package ``popdist_py.ipu`` estimates the memory and time on an IPU from the graph
and the PopTorch options. The estimates of memory and time become reports, errors, performance
counters and rows of the timeline. No module here computes the memory or the cycles of an operation,
or changes a model's results. May call: placement, tracing, calls, options, weights, update,
execution, enums, logger, errors, and the library's atomic_file, environment, ipu, ipu.page,
ipu.reports, ipu.runs, ipu.searches, ipu.what_if, popart, run_files, timeline.
"""
