"""What a prefill worker does with a router's requests: it refuses them. Its load is reported on the same stream."""

from baton_proto.worker import Delta, Failure, Submit
from worker.step_stream import RouterStream


class NoRequests:
    """Implements `worker.step_stream.StepHandler`."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def submit(self, router: RouterStream, request: Submit) -> None:
        problem = "a prefill worker takes prompts from decode workers only"
        failure = Failure("refused", problem, retryable=True, worker_id=self._worker_id)
        router.send(Delta(request.request_id, failure=failure))

    def cancel(self, router: RouterStream, request_id: str) -> None:
        """Nothing of a router's can be in flight."""

    def router_gone(self, router: RouterStream) -> None:
        """Nothing of a router's can be in flight."""
