"""The output of instances, as tagged lines on the terminal and as files of a run.

It is simplified for readers: equal tracebacks of several instances are shown once, tracebacks after
Ctrl-C are one line each, and progress bars in a file are whole lines.
"""
