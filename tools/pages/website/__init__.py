"""What the pages of docs/ need to become a site, beside Sphinx and its extensions.

Nothing here writes text for readers: that stands in the pages, the docstrings and the declarations.
"""
