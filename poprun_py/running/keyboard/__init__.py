"""Input from the keyboard or another standard input for one instance, and Ctrl-Z."""
