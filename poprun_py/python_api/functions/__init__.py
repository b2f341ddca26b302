"""Functions as jobs: a call is packed here, run in every instance, and its results are read here.

Here live the pickles of calls and results with their buffers beside them, the program that every
instance runs for a call, and how what it raised is raised again.
Nothing here starts a job or sends a byte: the launcher carries the files.
May call: errors, environment, own_files, output, planning, supervision.
"""
