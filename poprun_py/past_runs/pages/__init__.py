"""HTML pages of one run, of compared runs and of a scaling, which work without a network."""
