"""Plans and machines as text, tables, trees, SVG and HTML.

The functions here return text, but do not print it.
"""
