"""Input for one instance, from the user's terminal or another standard input, and Ctrl-Z."""
