"""Other projects' trainers and data loaders: one module for each project, which it imports.

The modules use only the public API. No other module of the package imports them.
"""
