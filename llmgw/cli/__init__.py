"""The command `llmgw`: one module a command.

Here belongs what people type and read: arguments, tables, exit codes, and `llmgw dev`, which runs every process.
"""
