"""Keyboard and standard input of the launcher, which are sent to one instance, and Ctrl-Z."""
