"""How many tokens went through each worker, as this router saw them: counters that only rise.

Counted by the choices of requests as tokens arrive, read by status.
"""

from dataclasses import dataclass

from runtime.discovery.worker_key import WorkerKey


@dataclass(slots=True)
class Flow:
    prompt_tokens: int = 0  # of prompts whose first token has come
    cached_tokens: int = 0  # of these, not computed by anyone
    output_tokens: int = 0


class Traffic:
    def __init__(self) -> None:
        self.total = Flow()
        self.placed = 0  # attempts that got workers
        self._flows: dict[WorkerKey, Flow] = {}

    def of(self, worker: WorkerKey) -> Flow:
        return self._flows.get(worker) or Flow()

    def prompt_done(self, worker: WorkerKey, prompt_tokens: int, cached_tokens: int) -> None:
        """`worker` ran the prompt."""
        for flow in (self.total, self._flow(worker)):
            flow.prompt_tokens += prompt_tokens
            flow.cached_tokens += cached_tokens

    def output(self, worker: WorkerKey, tokens: int) -> None:
        """`worker` decoded them."""
        self.total.output_tokens += tokens
        self._flow(worker).output_tokens += tokens

    def forget(self, worker: WorkerKey) -> None:
        """It is gone; the totals keep what it did. A request that still streams from it makes it known again, with a
        handful of bytes."""
        self._flows.pop(worker, None)

    def _flow(self, worker: WorkerKey) -> Flow:
        flow = self._flows.get(worker)
        if flow is None:
            flow = self._flows[worker] = Flow()
        return flow
