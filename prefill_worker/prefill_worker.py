"""The prefill role: a worker that runs prompts of decode workers, and takes requests that it keeps."""

from prefill_worker.prompts import Prompts
from worker.worker import Worker


class PrefillWorker(Worker):
    name = "prefill"

    def make_peers(self) -> Prompts:
        """Raises UnavailableError."""
        return Prompts(self._runtime, self.in_flight)
