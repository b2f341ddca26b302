"""What a launch may be asked for: every option once, and the ways in which it is written.

Here live LaunchConfig, the kinds of option, the command line's grammar and help, and the other
places of options: files and environment variables.
Nothing here looks at hosts or machines, or starts anything. May call: errors, on_use,
command_name, json_text, and the library's environment, device_numbers and pods.
"""
