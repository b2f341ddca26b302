"""What instances write: shown on the launcher's own screen, and kept in the run folder.

Here live whole, tagged lines on two streams, what is left out of them because it was shown
already, and the folders of --output-dir.
Nothing here decides how a job goes on. May call: errors, command_name;
of the library atomic_file, environment.
"""
