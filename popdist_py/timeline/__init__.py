"""The timeline of a job, which is one trace file with the time spans of all instances.

Each process writes its spans into a file of limited size (``recorder``, ``span_file``). The files
of all processes are merged into one trace on one clock (``merging``, ``trace_events``, ``clocks``).
The launcher imports modules of this package too. Except for ``__main__``, these modules do not
import third-party packages. The user's program and the library create spans with the module
``spans``. No module of this package displays a trace; the program Perfetto does.
May call: activities, atomic_file, environment, errors, heartbeat.
"""
