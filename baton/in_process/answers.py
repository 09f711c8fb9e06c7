"""Runs requests on an engine's thread and brings their news to the threads that wait for them."""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
from msgspec import Struct

from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence as EngineSequence
from router.api.wishes.prompt_logprobs import rows_in_parts
from router.requests.request import GenerateRequest
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler
from worker.engines.own import OwnAssembly

T = TypeVar("T")
CLOSED = "this LLM is closed"
News = SimpleQueue[list[SequenceOutput] | BaseException]


class Output(Struct):
    """The answer to a prompt; of a stream, what is new of it."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length"; of a stream, None until the last
    logprobs: list[TokenLogprobs] = []  # one per token, where they were asked for
    cached_tokens: int = 0  # of the prompt, whose KV was there already
    index: int = 0  # of the prompt
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens but the first, where they were asked for

    def add(self, new: "Output") -> None:
        self.text += new.text
        self.token_ids += new.token_ids
        self.finish_reason = new.finish_reason
        self.logprobs += new.logprobs
        self.cached_tokens = new.cached_tokens
        self.prompt_logprobs += new.prompt_logprobs


class Answers:
    """Any thread may ask."""

    def __init__(self, assembly: OwnAssembly, tokenizer: Tokenizer) -> None:
        self.memory = assembly.memory
        self.engine = assembly.engine
        self._tokenizer = tokenizer
        self._grammars = assembly.grammars
        self._serial = itertools.count(1)
        self._waiting: dict[str, News] = {}  # who waits for a sequence, by its request id
        self._fault: BaseException | None = None  # after which there are no answers
        self._held = ""  # why nothing is answered for now
        self._loop = EngineLoop(assembly.engine, self._step_done)
        self._loop.ended.add_done_callback(lambda ended: self.fail(ended.exception() or UnavailableError(CLOSED)))
        self._loop.start()

    def run(self, requests: Sequence[GenerateRequest]) -> Generator[Output, None, None]:
        """What is new of the answers, as it comes. Closing the iterator ends the requests. Raises UnavailableError when
        the model sleeps or a step fails, and what ended the engine."""
        news: News = SimpleQueue()
        tools = self._tokenizer, self._grammars
        answers = [_Answer(i, str(next(self._serial)), one, *tools) for i, one in enumerate(requests)]
        running = {answer.sequence.request_id: answer for answer in answers}
        self._waiting |= dict.fromkeys(running, news)
        try:
            self._check()
            adding = self._loop.call(lambda engine: self._add(engine, [answer.sequence for answer in answers]))
            adding.add_done_callback(lambda added: _tell_failure(added, news))
            while running:
                arrived = news.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                for output in arrived:
                    key = output.sequence.request_id
                    if key not in running:  # a stop string has ended it, and a step was on its way
                        continue
                    delta = running[key].take(output)
                    if delta.finish_reason is not None:
                        del running[key]
                        self._end([key], still_runs=output.finish is None)
                    yield delta
        finally:
            self._end(list(running), still_runs=True)

    def call_idle(self, work: Callable[[Engine], T]) -> T:
        """Runs `work` on the engine's thread. Raises UnavailableError when prompts are being answered, and what `work`
        raises."""

        def when_idle(engine: Engine) -> T:
            if self._held:
                raise UnavailableError(self._held)
            if engine.scheduler.has_work:
                raise UnavailableError("prompts are being answered; wait for their answers, or close their streams")
            while engine.has_work:
                engine.step()  # collects a step whose prompts were given up
            return work(engine)

        self._check()
        return self._loop.call(when_idle).result()

    @contextmanager
    def held(self, work: Callable[[Engine], object], reason: str) -> Iterator[None]:
        """Calls `work` like call_idle(). Until the context ends, prompts are refused with `reason`."""

        def hold(engine: Engine) -> None:
            work(engine)
            self._held = reason

        self.call_idle(hold)
        try:
            yield
        finally:
            self._held = ""

    def fail(self, error: BaseException) -> None:
        """Ends every answer that is waited for with the error, now and later."""
        self._fault = self._fault or error
        for news in list(self._waiting.values()):  # a copy at once: others come and go meanwhile
            news.put(self._fault)

    def close(self) -> None:
        """Raises DeadlineError when the last step does not end."""
        self._loop.stop()

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def _add(self, engine: Engine, sequences: list[EngineSequence]) -> None:
        if self.memory.asleep:
            raise UnavailableError(f"the model sleeps ({', '.join(self.memory.asleep)}); wake() it first")
        if problem := self._held or self.memory.problem:
            raise UnavailableError(problem)
        for sequence in sequences:
            engine.add(sequence)

    def _end(self, keys: list[str], *, still_runs: bool) -> None:
        for key in keys:
            self._waiting.pop(key, None)
        if still_runs and keys:
            self._loop.call(lambda engine: [engine.abort(key) for key in keys])

    def _step_done(self, step: StepOutput) -> None:
        mail: dict[News, list[SequenceOutput]] = {}
        for output in step.outputs:
            if (news := self._waiting.get(output.sequence.request_id)) is not None:
                mail.setdefault(news, []).append(output)
        for news, outputs in mail.items():
            news.put(outputs)


class _Answer:
    def __init__(
        self, index: int, key: str, request: GenerateRequest, tokenizer: Tokenizer, grammars: GrammarCompiler
    ) -> None:
        (sampling,) = request.sampling
        prompt = request.prompt.tolist()
        matcher = None if sampling.grammar is None else grammars.matcher(sampling.grammar)
        self.sequence = EngineSequence(key, prompt, len(prompt), sampling, hash_seed=request.hash_seed, matcher=matcher)
        self._index = index
        self._text = OutputText(tokenizer, request.stop, sampling.min_tokens)

    def take(self, output: SequenceOutput) -> Output:
        """Raises InvalidRequestError when the grammar cannot be followed, UnavailableError when the step has failed."""
        if output.invalid:
            raise InvalidRequestError("grammar", output.error or "cannot be followed")
        if output.finish == "error":
            raise UnavailableError(f"prompt {self._index}: {output.error}")
        sequence, token_ids, logprobs = self.sequence, list(output.token_ids), list(output.logprobs)
        text, finish = self._text.take(token_ids, logprobs, output.finish, output.stop_token)
        cached, told = sequence.prompt_counts.cached_tokens, self._of_prompt(output.prompt_logprobs)
        return Output(text, token_ids, finish, logprobs, cached, self._index, told)

    def _of_prompt(self, found: PromptLogprobs | None) -> list[TokenLogprobs]:
        if found is None:
            return []
        prompt = np.array(self.sequence.token_ids[: self.sequence.num_prompt_tokens], dtype=np.uint32)
        rows = (row for part in rows_in_parts(prompt, found) for row in part)
        return [TokenLogprobs(row.logprob, row.top) for row in rows if row.logprob is not None]


def _tell_failure(done: "Future[None]", news: News) -> None:
    if (error := done.exception()) is not None:
        news.put(error)
