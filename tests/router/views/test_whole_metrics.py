"""The metrics of two routers behind one address, as Prometheus reads them."""

from prometheus_client.parser import text_string_to_metric_families

from router.siblings import Siblings
from router.views.whole_metrics import WholeMetrics
from runtime.nats.client import NatsClient

TEXT = b"""# HELP a_total How many.
# TYPE a_total counter
a_total %d
# HELP b What it is.
# TYPE b gauge
b{name="x} 1"} %d
"""


async def test_whoever_is_scraped_tells_of_all_that_share_its_address_and_of_no_other(nats: NatsClient) -> None:
    addresses = {"router-1": "here:1", "router-2": "here:1", "router-3": "there:1"}
    routers = []
    for number, (name, address) in enumerate(addresses.items(), 1):
        siblings = Siblings(nats, name, lambda: addresses)
        routers.append(WholeMetrics(name, lambda number=number: TEXT % (number, 10 * number), siblings))  # type: ignore[misc]
        await routers[-1].start(address)
    families = {}
    for family in text_string_to_metric_families((await routers[1].exposition()).decode()):
        families[family.name] = {sample.labels["router"]: sample.value for sample in family.samples}
        assert all(sample.labels.get("name", "x} 1") == "x} 1" for sample in family.samples)
    assert families == {"a": {"router-1": 1, "router-2": 2}, "b": {"router-1": 10, "router-2": 20}}
