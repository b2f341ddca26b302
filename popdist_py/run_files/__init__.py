"""What a program leaves in the folder of its run (--output-dir), for the pages about the run.

Here live the place that the launcher gave, the values that were logged, and what the model of the
device says. Nothing here communicates, and no failure here ends or slows a program.
May call: environment, atomic_file.
"""
