"""HTML pages that show one run, compared runs or a scaling, and that work without a network."""
