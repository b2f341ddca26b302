"""A job that runs: its start, its limits and hangs, its stop, and how it ended.

Here live the supervisor, mpirun's process, the control channel, and the values of a run.
Nothing here plans or knows options: it is given a Job. May call: output, keyboard, observation,
timeline, instance, its own_host, errors, json_text, on_use, command_name, and the library's
environment, peers and start_hook.
"""
