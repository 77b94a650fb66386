"""The page, health and metrics of a controller, read-only, from its own mirror.

Here belong routes, templates and static files. Nothing here writes to the store or asks it.
"""
