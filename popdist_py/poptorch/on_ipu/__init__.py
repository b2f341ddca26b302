"""What a model would need on the device: its forward as a graph, and the device model's answers.

Here PopTorch's models and options become the values of ``popdist_py.ipu``, and its answers become
reports, errors and counters.
Nothing here computes what an operation needs in memory or cycles, or changes what a model computes.
May call: ipu, placement, tracing, calls, options, weights, update, execution, enums, logger,
errors, and the library's environment, popart, run_files, timeline.
"""
