"""Jobs that a Python program starts: each has a launcher of its own, and the program a handle.

Here live the handle, the launcher's process, and the channel between the two.
Nothing here plans or supervises: the launcher's process calls the same launcher as the command.
May call: launcher, launch_planning, functions, planning, supervision, observation, showing, config,
console, terminal, command_name, errors.
"""
