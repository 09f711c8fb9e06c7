"""Where the ranks of a server publish, and how they are asked."""

from engine.vllm.server.gauges import Gauges
from engine.vllm.server.ranks import HEADER, Rank, ranks_of
from runtime.config.external import ExternalWorkerConfig

SERVER = ExternalWorkerConfig("gpu-7", "http://h:8000", "tcp://h:5557", "tcp://h:6557")
GAUGES = Gauges(num_blocks=100)


def test_the_only_rank_is_where_the_configuration_says_whatever_its_number() -> None:
    assert list(ranks_of({3: GAUGES}, SERVER)) == [Rank(3, 100, "tcp://h:5557", "tcp://h:6557")]


def test_each_of_several_ranks_has_ports_and_a_header_of_its_own() -> None:
    assert list(ranks_of({1: GAUGES, 0: GAUGES}, SERVER)) == [
        Rank(0, 100, "tcp://h:5557", "tcp://h:6557", {HEADER: "0"}),
        Rank(1, 100, "tcp://h:5558", "tcp://h:6558", {HEADER: "1"}),
    ]


def test_a_server_with_some_of_all_ranks_takes_their_places_and_publishes_under_their_numbers() -> None:
    assert [(rank.events, rank.headers) for rank in ranks_of({4: GAUGES, 5: GAUGES}, SERVER)] == [
        ("tcp://h:5561", {HEADER: "0"}),
        ("tcp://h:5562", {HEADER: "1"}),
    ]
