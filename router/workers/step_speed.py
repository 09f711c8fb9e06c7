"""How fast each worker's steps are: the step-time model, fitted to the steps that its load reports time.

A worker is as fast as the profile until it has reported ENOUGH steps. In a step that does both, prompts took what the
decodes did not take by the model. Event loop only.
"""

from collections import deque
from typing import Final

from baton_proto.discovery import LoadReport
from router.workers.load import LoadLedger
from runtime.config.step_fit import ENOUGH, fitted
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

WINDOW: Final = 128  # steps kept of each kind
REFIT_AFTER: Final = 16  # new steps


class _Steps:
    __slots__ = ("decode", "new", "prefill", "times")

    def __init__(self, times: StepTimes) -> None:
        self.prefill: deque[list[float]] = deque(maxlen=WINDOW)  # rows as step_fit has them
        self.decode: deque[list[float]] = deque(maxlen=WINDOW)
        self.new = 0
        self.times = times


class StepSpeeds:
    def __init__(self, ledger: LoadLedger, profile: StepTimes) -> None:
        self._ledger = ledger
        self._profile = profile
        self._steps: dict[WorkerKey, _Steps] = {}

    def load_report(self, report: LoadReport) -> None:
        key = (report.worker_id, report.incarnation)
        if not self._ledger.knows(key):
            return
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = _Steps(self._profile)
        for step in report.steps:
            decode_ms = steps.times.decode_ms(step.sequences, step.context_tokens) if step.sequences else 0.0
            if step.prompt_tokens and step.step_ms > decode_ms:
                steps.prefill.append([step.prompt_tokens, step.prompt_pairs, step.step_ms - decode_ms])
            elif step.sequences and not step.prompt_tokens and step.step_ms > 0:
                steps.decode.append([1.0, step.sequences, step.context_tokens, step.step_ms])
            steps.new += 1
        if steps.new >= REFIT_AFTER and max(len(steps.prefill), len(steps.decode)) >= ENOUGH:
            steps.new = 0
            known = None if steps.times is self._profile else steps.times
            steps.times = fitted(list(steps.prefill), list(steps.decode), self._profile, known)
            self._ledger.learn(key, steps.times)

    def forget(self, worker: WorkerKey) -> None:
        """The incarnation is gone."""
        self._steps.pop(worker, None)
