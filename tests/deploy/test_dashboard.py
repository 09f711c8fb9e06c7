"""The dashboard is one that Grafana loads. Grafana is in neither Debian nor PyPI; its own model of a dashboard is."""

import json
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.folder import dashboard

COLUMNS = 24
ROWS = ["Requests", "Routing", "Workers", "Transfer", "Events", "Planner"]


def lost(wanted: Any, got: Any, where: str = "") -> list[str]:
    """What is in `wanted` and not, or otherwise, in `got`."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        return [one for key in wanted for one in lost(wanted[key], got.get(key), f"{where}.{key}")]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        return [one for i, pair in enumerate(zip(wanted, got, strict=True)) for one in lost(*pair, f"{where}[{i}]")]
    return [] if wanted == got else [f"{where}: {wanted!r} became {got!r}"]


def test_grafanas_own_model_reads_it_and_loses_nothing() -> None:
    register_default_plugins()
    read = Dashboard.from_json(dashboard())
    assert lost(dashboard(), json.loads(JSONEncoder().encode(read))) == []


def test_it_has_what_grafana_asks_of_a_dashboard() -> None:
    whole = dashboard()
    assert whole["schemaVersion"] >= 36
    assert "id" not in whole, "Grafana gives it"
    panels = whole["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)
            assert all("$namespace" in target["expr"] for target in panel["targets"]), panel["title"]


def test_its_data_source_and_namespace_are_variables() -> None:
    kinds = {variable["name"]: variable["type"] for variable in dashboard()["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "namespace": "query"}


def test_no_panel_lies_on_another_one() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
