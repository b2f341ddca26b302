"""The output of instances, as tagged lines on the terminal and as files of a run."""
