"""The alert rules: promtool accepts them, they fire when they should, and somebody who is woken finds what to do."""

from pathlib import Path

from tests.deploy.folder import DEPLOY, alerts, rows
from tests.deploy.prometheus import needs_prometheus, promtool


@needs_prometheus
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))
    promtool("check", "rules", str(DEPLOY / "alerts.yml"))


@needs_prometheus
def test_the_rules_fire_when_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_fire.yml")))


def test_each_has_a_severity_a_summary_and_a_row_in_the_documentation() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        assert "for" in rule, rule["alert"]
    assert [row[0] for row in rows("### Alerts")] == [rule["alert"] for rule in alerts()]
