"""`python -m llmgw.controller`: the process, as its command starts it."""

from llmgw.controller.run import main

main()
