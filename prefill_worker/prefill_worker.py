"""The prefill role: a worker that runs prompts of decode workers, and takes requests that it keeps."""

from prefill_worker.passed_prompts import PassedPrompts
from prefill_worker.prompts import Prompts
from worker.requests.peers import Peers
from worker.worker import Worker


class PrefillWorker(Worker):
    name = "prefill"

    def make_peers(self) -> Peers:
        """Raises UnavailableError."""
        role = PassedPrompts if self._runtime.assembly.passes else Prompts
        return role(self._runtime, self.in_flight)
