"""The option that all commands take which ask a running planner."""

from typing import Annotated

import typer

PlannerTimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up when the planner takes longer.")
]
