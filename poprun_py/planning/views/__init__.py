"""Plans and machines as text, tables, trees, SVG and HTML.

The functions here turn values into text. They print nothing and decide nothing.
"""
