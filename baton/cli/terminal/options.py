"""Options that several commands take, with one wording each. Those that belong together are the fields of a dataclass,
which a command takes as one parameter; lazy_group.py makes options of them."""

from pathlib import Path
from typing import Annotated

import typer

UINT32_MAX = 2**32 - 1  # what fields of the protocol hold; smaller limits are the service's to say
UINT64_MAX = 2**64 - 1

AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        "--service",
        envvar="BATON_ADDRESS",
        metavar="HOST:PORT or NAME",
        help="gRPC address of the service, or its name where several run here.",
        show_default="the one that runs here",
    ),
]
ServiceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of the service, where several run on this machine.")
]
OperatorKeyFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Key to show. [default: the variable BATON_OPERATOR_KEY, or the service's own]"),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Key to show to the service. [default: the variable BATON_API_KEY]"),
]
CaFileOption = Annotated[
    Path | None,
    typer.Option(envvar="BATON_CA_FILE", metavar="FILE", help="CA of the service's certificate, where it speaks TLS."),
]
RayAddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="RAY_ADDRESS",
        metavar="HOST:PORT",
        help="Of the Ray cluster; auto: that of this machine.",
        rich_help_panel="Ray",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Give up when it takes longer.")
]
WaitOption = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Give up when the router takes longer.")
]
DrainTimeoutOption = Annotated[
    float,
    typer.Option(
        "--drain-timeout", min=0.1, max=86400.0, metavar="SECONDS", help="For requests in flight, and again for peers."
    ),
]
OfModelOption = Annotated[
    str, typer.Option("--model", metavar="NAME", show_default=False, help="The model, where several are served.")
]

STATUS_TIMEOUT_S = 10.0
