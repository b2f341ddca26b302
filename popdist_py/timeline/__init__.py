"""The timeline of a job: what its instances did when, as spans of time in one trace.

Each process writes spans into a file of bounded size (``recorder``, ``span_file``); the files of
all become one trace (``merging``, ``trace_events``) on one clock (``clocks``). The launcher reads
the files with the same modules: standard library only. What is a span, the program says and the
instrumented library (``spans``). Nothing here shows a trace: Perfetto does. May call: activities,
atomic_file, environment, errors, heartbeat.
"""
