"""Function calls as jobs, from the packed call to the results of all instances.

Contains the pickles of calls and results with their buffers, the program that instances run for a
call, and how an instance's exception is raised again. The launcher starts the jobs and transfers
the files.
"""
