"""HTML pages about one run, compared runs or a program's scaling, which need no network."""
