"""From what was asked for to a LaunchPlan: who is where, on which CPUs, by which command.

Here live the inputs, topology, placement, variables, the dialects of MPI, and the plan with its
file.
Nothing here starts a process of the job. May call: hosts, hardware, pods, config, errors, on_use,
command_name, the library's environment, device_numbers and pods, and instance for the values of a
binding.
"""
