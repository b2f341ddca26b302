"""Metrics of a job, which all instances reduce together and the first instance writes to sinks.

``Metrics`` collects the numbers. The sinks write a CSV file, an event file of TensorBoard, or a run
of Weights & Biases. No module of this package imports torch or NumPy, and a sink does not open
anything before its first write.
May call: context, errors, activities, atomic_file, run_files.
"""
