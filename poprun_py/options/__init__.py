"""The declarations, sources and values of a launch's options.

This package contains the types and declarations of options, the readers of option sources (command
line, environment variables, configuration files, keyword arguments of Python), LaunchConfig, and
the help pages.
"""
