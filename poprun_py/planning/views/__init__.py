"""Plans and machines as text, tables, trees, SVG and HTML.

Every function turns values into text. No module here prints or decides.
"""
