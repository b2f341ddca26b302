"""HTML pages that show one run, compared runs or the scaling of a program, without a network."""
