"""Files that a program writes into the folder of its run (--output-dir), for the run's pages.

place           the paths of the files, which only one process of the program writes
logged_values   the values that the program logged at its steps
device_file     the device model's documents about the compiled models

No module of this package communicates with other instances. A file that cannot be written does not
end the program.
May call: environment, atomic_file.
"""
