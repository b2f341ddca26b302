"""Jobs that a Python program starts: each has a launcher of its own, and the program a handle.

Here live the handle with its listener, the launcher's process, and the channel between them.
Nothing here plans or supervises: the launcher's process calls the same launcher as the command.
May call: launcher, launch_planning, functions, planning, supervision, observation, showing, config,
console, terminal, command_name, instance, its own_host, errors.
"""
