"""`python -m baton`: the command line, where the `baton` command is not on the path."""

from baton.cli import main

main()
