"""Stands in for generation in tests of the APIs: gives the tokens that it was told to, remembers what was asked."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from baton_proto.sampling import SamplingParams, TokenLogprobs
from baton_proto.token_counts import TokenCounts
from router.counters.tally import Service
from router.requests.answer import Answer
from router.requests.body_budget import BodyBudget
from router.requests.frontend import Frontend, GrammarCheck, Limits
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from runtime.config.serving import RouterConfig
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

MODEL = "tiny"
MAX_MODEL_LEN = 4096


class ScriptedGenerator:
    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str] = ("Hello there.",)) -> None:
        """Choice i of a request answers with `answers[i]`, token by token, and ends with an EOS token."""
        self.tokenizer = tokenizer
        self.answers = [[*map(int, tokenizer.encode(answer)), EOS_TOKEN_IDS[0]] for answer in answers]
        self.requests: list[GenerateRequest] = []
        self.error: Exception | None = None  # raised instead of token number `error_at` of any choice
        self.error_at = 0
        self.stuck_at: int | None = None  # waits forever instead of giving this token
        self.cancelled = asyncio.Event()
        self.max_model_len = MAX_MODEL_LEN
        self.pool_tokens: int | None = None
        self.away_tokens = 0

    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.pool_tokens, self.away_tokens)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        self.requests.append(request)
        completion_tokens = 0
        completed = False
        try:
            for index, sampling in enumerate(request.sampling):
                answer = Answer(self.tokenizer, request, index)
                for number, token_id in enumerate(self.answers[index % len(self.answers)]):
                    piece = await self._piece(index, number, token_id, answer, sampling)
                    completion_tokens += len(piece.token_ids)
                    yield piece
                    if piece.finish_reason is not None:
                        break
            completed = True
        finally:
            if not completed:
                self.cancelled.set()
        served_by = [Service(i, "decode-0", "prefill-0", 3, 4096, "shm", 1, 0) for i in range(len(request.sampling))]
        counts = TokenCounts(len(request.prompt), min(16, len(request.prompt) - 1), completion_tokens)
        yield Finished(counts, served_by)

    async def _piece(self, index: int, number: int, token_id: int, answer: Answer, sampling: SamplingParams) -> Piece:
        await asyncio.sleep(0)
        if self.stuck_at == number:
            await asyncio.Event().wait()
        if self.error is not None and self.error_at == number:
            raise self.error
        logprobs = [] if sampling.logprobs is None else [logprobs_of(token_id, sampling.logprobs)]
        stop_token = token_id if token_id in EOS_TOKEN_IDS else None
        finish = "stop" if stop_token is not None else "length" if number + 1 == sampling.max_tokens else None
        return answer.take([token_id], logprobs, finish, stop_token)


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """Made up: the sampled token and its successors in the vocabulary."""
    top = [((token_id + i) % VOCAB_SIZE, -0.5 - i) for i in range(count)]
    return TokenLogprobs(-0.5, top)


def make_frontend(
    generator: ScriptedGenerator, not_ready: str | None = None, grammars: GrammarCheck | None = None
) -> Frontend:
    return Frontend(
        model=MODEL,
        created_s=int(time.time()),
        tokenizer=generator.tokenizer,
        generator=generator,
        not_ready=lambda: not_ready,
        config=RouterConfig(request_timeout_s=60.0, max_body_bytes=1 << 20),
        bodies=BodyBudget(1 << 22),
        grammars=grammars,
    )


def tiny_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, VOCAB_SIZE)
