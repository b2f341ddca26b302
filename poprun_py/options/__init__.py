"""The declarations, sources and values of a launch's options.

The package has the types and declarations of options, the readers of their sources (command line,
environment variables, configuration files, keyword arguments of Python), LaunchConfig, and the help
pages.
"""
