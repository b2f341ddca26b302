"""What ``make release-check`` looks at; each step takes a Release and returns a line of result.

Nothing here imports the packages: what is judged is what they build and install.
"""
