"""Every reason that crosses a process has its words."""

from baton_proto.generated import inference_pb2 as pb
from baton_proto.placement_words import BARRED, LEFT_OUT, REASONS


def test_every_value_of_an_enum_has_words() -> None:
    for enum, words in ((pb.PlacementReason, REASONS), (pb.BarredReason, BARRED), (pb.LeftOutReason, LEFT_OUT)):
        unspecified = {0} - words.keys()
        assert set(enum.values()) - unspecified == words.keys()
        assert len(set(words.values())) == len(words)
