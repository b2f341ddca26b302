"""Launch plans and machines as text, tables, trees, SVG and HTML.

The functions of this package return text, but do not print the text.
"""
