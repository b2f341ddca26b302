"""Metrics of a job, which all instances reduce together and the first instance writes to sinks.

The class ``Metrics`` collects and reduces the numbers. Each sink writes a CSV file, JSON lines, an
event file of TensorBoard, or a run of Weights & Biases. No module of this package imports torch or
NumPy, and a sink does not open anything before its first write.
May call: context, errors, activities, atomic_file, run_files.
"""
