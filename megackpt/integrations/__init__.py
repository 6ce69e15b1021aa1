"""Other projects' trainers and data loaders: one module for each project, which it imports.

They use the public API only, and nothing else in the package imports them.
"""
