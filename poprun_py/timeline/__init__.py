"""The timeline of a job as the launcher sees it: what has to be known of other hosts' clocks.

Here live the questions for their time, and the answers in the folder of the spans.
Nothing here knows how spans are stored, or moves files: the library's own ``popdist_py.timeline``
and output do. May call: instance, and the library's timeline.
"""
