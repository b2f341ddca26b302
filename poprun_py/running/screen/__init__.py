"""The output of instances, as tagged lines on the terminal and as files of a run.

Contains the rules for repeated tracebacks and progress bars, and the folders of --output-dir. No
module here decides how a job goes on.
"""
