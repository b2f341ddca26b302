"""The options of a launch, from their declarations to one LaunchConfig.

The package has the types and declarations of options, the readers of their sources (command line,
environment variables, configuration files, keyword arguments of Python), and the help.
"""
