"""The timeline of a job as the launcher sees it: where instances record, and their one trace.

Here live the folder of the instances' files, the questions for other hosts' clocks, and the file
that is made at the end. Nothing here knows how spans are stored: the library's own
``popdist_py.timeline`` does. May call: instance, and the library's timeline.
"""
