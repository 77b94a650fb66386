"""The gateway process: one OpenAI-compatible address in front of every ready replica.

Here belongs the data path, on asyncio and uvloop, and its view of the routes. It must serve without etcd and without
any controller.
"""
