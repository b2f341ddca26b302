"""The memory and the time that a model would need on an IPU.

This package turns the forward pass of a PopTorch model into a graph of operations. The package
``popdist_py.ipu``, which is a model of the device, computes memory and time from the graph and the
PopTorch options. The results become reports, errors, counters and rows of the timeline.
No module here computes the memory or the cycles of an operation, or changes a model's results.
May call: placement, tracing, calls, options, weights, update, execution, enums, logger,
errors, and the library's environment, ipu, ipu.runs, popart, run_files, timeline.
"""
