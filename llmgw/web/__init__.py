"""The page and the API of a controller, read-only, rendered from one snapshot.

Here belong routes, templates and static files. Nothing here writes to the store or asks it.
"""
