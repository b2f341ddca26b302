"""Files for a run's web pages, which a program writes into the run's folder (--output-dir).

place           the paths of the files, which only one process of the program writes
logged_values   the values that the program logged at its steps
device_file     the device model's descriptions of the compiled models

No module of this package communicates with other instances. An error in writing one of these files
does not end the program.
May call: environment, atomic_file.
"""
