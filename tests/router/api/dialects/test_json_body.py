"""What a body of JSON is read as, and how often."""

import weakref

from router.api.dialects.json_body import NotHereError, read_soon
from router.api.wishes.validation import IN_PLACE_BYTES
from runtime.side_lane import SideLane
from tests.no_collector import no_collector


class Told:
    """What the reader of a body is told beside it."""


async def test_what_was_found_elsewhere_leaves_nothing_of_the_first_reading() -> None:
    told, finds = Told(), list[bool]()
    lane = SideLane(threads=1)  # which has let go of the first reading when it begins the second one

    async def find() -> bool:
        finds.append(True)
        return True

    def read(data: bytes, told: Told) -> int:
        if not finds:
            raise NotHereError("previous_response_id", "is not here", find)
        return len(data)

    gone = weakref.ref(told)
    with no_collector():
        assert await read_soon(lane, None, read, b" " * 2 * IN_PLACE_BYTES, told) == 2 * IN_PLACE_BYTES
        del told
        assert gone() is None
