"""The files in `deploy/`, as the tests read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPERATING = ROOT / "docs" / "operating.md"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "baton.json").read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query), with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "10s").replace("$namespace", ".*")
            yield panel["title"], query


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of docs/operating.md, without its first two lines."""
    lines = OPERATING.read_text().split(f"{heading}\n")[1].split("\n#")[0].splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]
