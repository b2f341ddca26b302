"""The output of instances, as tagged lines on the terminal and as files of a run.

The output is made easier to read. Equal tracebacks of several instances are shown once, tracebacks
after Ctrl-C are shortened to one line each, and progress bars in a file become whole lines.
"""
