"""Language models on a private fleet of machines, behind one OpenAI-compatible address.

Imports go one way, high to low: testing, cli (and llmgw_agent), controller and gateway, web, store and obs, config,
core, errors. Nothing belongs into this file.
"""
