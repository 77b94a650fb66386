"""`python -m llmgw.cli`: the command `llmgw`."""

import sys

from llmgw.cli.main import main

sys.exit(main())
