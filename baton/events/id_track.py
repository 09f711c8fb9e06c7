"""Which of one worker's batch ids have been seen, and which are missing between them. No I/O here."""


class IdTrack:
    def __init__(self) -> None:
        self.last = 0  # highest id seen; 0: none
        self.missing: list[range] = []  # between the first and the last one seen

    def observe(self, event_id: int) -> bool:
        """Notes an id. False if it was seen before: publishers send again what was not acknowledged."""
        if event_id > self.last:
            if self.last and event_id > self.last + 1:
                self.missing.append(range(self.last + 1, event_id))
            self.last = event_id
            return True
        for i, hole in enumerate(self.missing):
            if event_id in hole:
                parts = (range(hole.start, event_id), range(event_id + 1, hole.stop))
                self.missing[i : i + 1] = [part for part in parts if part]
                return True
        return False
