"""How fast each worker is: the step-time model, fitted to the steps that its load reports time, and what it measured
of restoring KV.

Until a worker has reported some steps of a kind, prompts or decodes, it is expected to be as fast as those that have,
and without any of these as the profile: because all known workers may be slower than the profile, an unknown one must
not look faster than they are. Ranks of one vLLM server have one fit, because times of prompts that are seen from
outside differ fourfold under load, and one that looks slow would not be asked, hence would show no other times. Event
loop only.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec.structs import astuple

from baton_proto.discovery import LoadReport
from router.workers.load import LoadLedger
from runtime.config.step_fit import FittedSteps
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

USUAL_S: Final = 1.0  # so often at most it is seen how fast workers usually are
USUAL_CHANGED: Final = 0.02  # relative: less is no news
TYPICAL: Final = (2048, 2.1e6, 32, 64e3)  # a step: prompt tokens, their pairs, sequences, tokens of their context


class StepSpeeds:
    def __init__(
        self, ledger: LoadLedger, profile: StepTimes, server: Callable[[WorkerKey], str] = lambda worker: ""
    ) -> None:
        """`server`: names the server whose rank a worker is; empty: of none."""
        self._ledger = ledger
        self._profile = profile
        self._server = server
        self._steps: dict[WorkerKey, FittedSteps] = {}
        self._alike: dict[WorkerKey, set[WorkerKey]] = {}  # who has the same fit, itself among them
        self._unseen: set[WorkerKey] = set()  # those that have not shown both kinds of steps
        self._usual = profile
        self._usual_us = 0  # when it was seen, by the ledger's clock
        self._has_news = False  # a worker has been fitted since

    def load_report(self, report: LoadReport) -> None:
        key = (report.worker_id, report.incarnation)
        if not self._ledger.knows(key):
            return
        self._ledger.learn_restoring(key, report.host_token_ms, report.disk_token_ms)
        steps = self._steps.get(key)
        if steps is None:
            steps = self._begin(key)
        for step in report.steps:
            steps.add(step)
        if steps.refit():
            for worker in filter(self._ledger.knows, self._alike[key]):
                self._ledger.learn(worker, steps.times)
            self._has_news = True
            if all(steps.seen):
                self._unseen -= self._alike[key]
        if self._has_news and self._unseen and self._ledger.now_us - self._usual_us >= USUAL_S * 1e6:
            self._see_usual()

    def _begin(self, key: WorkerKey) -> FittedSteps:
        server = self._server(key)
        groups = (self._alike[rank] for rank in self._alike if server and self._server(rank) == server)
        alike = self._alike[key] = next(groups, set())
        steps = next((self._steps[rank] for rank in alike), None) or FittedSteps(self._profile)
        alike.add(key)
        self._steps[key] = steps
        self._unseen.add(key)
        self._expect_usual(key)
        return steps

    def _see_usual(self) -> None:
        """Takes for each kind of steps the times of the worker in the middle of those that have shown it."""
        self._usual_us, self._has_news = self._ledger.now_us, False
        tokens, pairs, sequences, context = TYPICAL
        workers = self._steps.values()
        prefills = sorted((w.times.prefill_ms(tokens, pairs), w.times.prefill) for w in workers if w.seen[0])
        decodes = sorted((w.times.decode_ms(sequences, context), w.times.decode) for w in workers if w.seen[1])
        kinds = ((prefills, self._profile.prefill), (decodes, self._profile.decode))
        usual = [ms for shown, profile in kinds for ms in (shown[(len(shown) - 1) // 2][1] if shown else profile)]
        if not np.allclose(usual, astuple(self._usual), rtol=USUAL_CHANGED, atol=0.0):
            self._usual = StepTimes(*usual)
            for key in self._unseen:
                self._expect_usual(key)

    def _expect_usual(self, key: WorkerKey) -> None:
        """The ledger may have closed the account of one that is about to leave."""
        if self._ledger.knows(key):
            steps = self._steps[key]
            steps.expect(self._usual)
            self._ledger.learn(key, steps.times)

    def slowness(self) -> list[tuple[tuple[str], float]]:
        """How long a step takes, by worker, as a multiple of what it takes by the profile. What a worker has not
        shown counts as the profile has it."""
        usual_ms = self._profile.step_ms(*TYPICAL)
        shown = ((key, steps.shown(self._profile)) for key, steps in self._steps.items())
        return [((key[0],), times.step_ms(*TYPICAL) / usual_ms) for key, times in shown]

    def forget(self, worker: WorkerKey) -> None:
        """The incarnation is gone."""
        self._steps.pop(worker, None)
        self._alike.pop(worker, set()).discard(worker)
        self._unseen.discard(worker)
