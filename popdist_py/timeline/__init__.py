"""The timeline of a job: what its instances did when, as spans of time in one trace.

Each process writes spans into a file of bounded size (``recorder``, ``span_file``); the files of
all become one trace (``merging``, ``trace_events``) on one clock (``clocks``). The launcher reads
the files with the same modules: standard library only. Nothing here decides what is a span: that
is ``popdist_py.spans``'s and the instrumented library's. May call: atomic_file, environment,
heartbeat.
"""
