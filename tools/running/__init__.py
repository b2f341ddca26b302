"""Terminals, browsers and commands, as pages and tests of them use them."""
