"""The decode role: a worker that takes requests, and the KV of prompts that prefill workers run."""

from decode_worker.handoff import Handoffs
from decode_worker.passed_prompts import PassedPrompts
from worker.requests.peers import Peers
from worker.worker import Worker


class DecodeWorker(Worker):
    name = "decode"

    def make_peers(self) -> Peers:
        """An engine that takes no KV runs all prompts itself."""
        if self._runtime.assembly.passes:
            return PassedPrompts(self._runtime, self.fail)
        kv = self._runtime.assembly.kv
        return Peers() if kv is None else Handoffs(self._runtime, kv, self.fail, self.outputs)
