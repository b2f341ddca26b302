"""The options of a launch, each declared once with every way to write it.

Contains LaunchConfig, the kinds of options, the command-line parser and the help, option files and
environment variables. No module here inspects hosts or machines, or starts anything.
"""
