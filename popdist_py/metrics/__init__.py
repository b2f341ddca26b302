"""Metrics of a whole job: gathered step by step on every instance, written down by one.

Here live the numbers of an instance, their meeting, and the sinks that write them.
Nothing here imports torch or NumPy, and no sink opens anything before its first write.
May call: context, errors, activities, atomic_file, run_files.
"""
