"""How fast each worker is: the step-time model, fitted to the steps that its load reports time, and what it measured
of restoring KV.

Until a worker has reported RECENT steps of a kind, prompts or decodes, it is expected to be as fast as those that have,
and without any of these as the profile: who is known to be slow must not lose to who only is not known. When the last
RECENT steps of a kind take CHANGED times as long as expected, or as short, the worker has changed: the earlier ones are
forgotten, and until ENOUGH new ones are there, the coefficients are those from before, so many times. In a step that
does both, prompts took what the decodes did not take by the model. Event loop only.
"""

from collections import deque
from typing import Final

import numpy as np
from msgspec.structs import astuple

from baton_proto.discovery import LoadReport
from router.workers.load import LoadLedger
from runtime.config.step_fit import ENOUGH, fitted, ratios
from runtime.config.step_times import StepTimes
from runtime.discovery.worker_key import WorkerKey

WINDOW: Final = 128  # steps kept of each kind
REFIT_AFTER: Final = 16  # new steps
RECENT: Final = 16  # steps of a kind
CHANGED: Final = 1.3
TYPICAL: Final = (2048, 2.1e6, 32, 64e3)  # a step: prompt tokens, their pairs, sequences, tokens of their context


class _Steps:
    __slots__ = ("decode", "known", "new", "prefill", "profile", "times")

    def __init__(self, times: StepTimes) -> None:
        self.prefill: deque[list[float]] = deque(maxlen=WINDOW)  # rows as step_fit has them
        self.decode: deque[list[float]] = deque(maxlen=WINDOW)
        self.new = 0
        self.known = False  # `times` are of a fit to mostly the same rows
        self.profile = self.times = times

    def notice_change(self) -> None:
        """Keeps of each kind what the worker has reported since it became faster or slower."""
        slower = [1.0, 1.0]
        for kind, rows in enumerate((self.prefill, self.decode)):
            found = ratios(list(rows)[-RECENT:], self.times)
            ratio = float(np.median(found)) if len(found) == RECENT else 1.0
            if not 1 / CHANGED < ratio < CHANGED:
                slower[kind] = ratio
                for _ in range(len(rows) - RECENT):
                    rows.popleft()
        if slower != [1.0, 1.0]:
            scaled = [ms * slower[place // 3] for place, ms in enumerate(astuple(self.times))]
            self.profile, self.known = StepTimes(*scaled), False

    def fit(self) -> None:
        self.times = fitted(list(self.prefill), list(self.decode), self.profile, self.times if self.known else None)
        self.known = max(len(self.prefill), len(self.decode)) >= ENOUGH

    @property
    def seen(self) -> tuple[bool, bool]:
        """Whether its steps with prompts and its decodes are enough to say anything."""
        return len(self.prefill) >= RECENT, len(self.decode) >= RECENT

    def expect(self, usual: StepTimes) -> None:
        """What it has not shown is expected to be as usual."""
        prefill, decode = self.seen
        self.profile = StepTimes(
            *(self.profile if prefill else usual).prefill, *(self.profile if decode else usual).decode
        )
        self.times = StepTimes(*(self.times if prefill else usual).prefill, *(self.times if decode else usual).decode)


class StepSpeeds:
    def __init__(self, ledger: LoadLedger, profile: StepTimes) -> None:
        self._ledger = ledger
        self._profile = profile
        self._steps: dict[WorkerKey, _Steps] = {}
        self._unseen: set[WorkerKey] = set()  # those that have not shown both kinds of steps

    def load_report(self, report: LoadReport) -> None:
        key = (report.worker_id, report.incarnation)
        if not self._ledger.knows(key):
            return
        self._ledger.learn_restoring(key, report.host_token_ms, report.disk_token_ms)
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = _Steps(self._profile)
            self._unseen.add(key)
            self._expect_usual()
        for step in report.steps:
            decode_ms = steps.times.decode_ms(step.sequences, step.context_tokens) if step.sequences else 0.0
            if step.prompt_tokens and step.step_ms > decode_ms:
                steps.prefill.append([step.prompt_tokens, step.prompt_pairs, step.step_ms - decode_ms])
            elif step.sequences and not step.prompt_tokens and step.step_ms > 0:
                steps.decode.append([1.0, step.sequences, step.context_tokens, step.step_ms])
            steps.new += 1
        if steps.new >= REFIT_AFTER and max(len(steps.prefill), len(steps.decode)) >= RECENT:
            steps.new = 0
            steps.notice_change()
            steps.fit()
            self._ledger.learn(key, steps.times)
            if all(steps.seen):
                self._unseen.discard(key)
            self._expect_usual()

    def _expect_usual(self) -> None:
        """Of each kind the median of those that have shown it."""
        if not self._unseen:
            return
        usual = list(astuple(self._profile))
        for kind in (0, 1):
            half = slice(3 * kind, 3 * kind + 3)
            shown = [astuple(steps.times)[half] for steps in self._steps.values() if steps.seen[kind]]
            if shown:
                usual[half] = np.median(shown, axis=0).tolist()
        for key in self._unseen:
            self._steps[key].expect(StepTimes(*usual))
            self._ledger.learn(key, self._steps[key].times)

    def slowness(self) -> list[tuple[tuple[str], float]]:
        """By worker: how long a step takes there, as a multiple of what it takes by the profile."""
        usual_ms = self._profile.step_ms(*TYPICAL)
        return [((key[0],), steps.times.step_ms(*TYPICAL) / usual_ms) for key, steps in self._steps.items()]

    def forget(self, worker: WorkerKey) -> None:
        """The incarnation is gone."""
        self._steps.pop(worker, None)
        self._unseen.discard(worker)
