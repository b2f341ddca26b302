"""The manual pages of the commands, which the build of the wheel makes, and the texts in them.

The build environment has setuptools and click. No module here imports another package.
"""
