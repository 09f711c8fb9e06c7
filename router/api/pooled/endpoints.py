"""The dialects of embeddings, scores and ranks. Each input of a call is a request of its own: it is queued, placed and
replayed by itself, so that servers share a long call."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw, Struct

from baton_proto.pooling import EMBED, SCORE as SCORES
from router.api.dialects.dialect import Answer, Asked, Dialect
from router.api.dialects.json_body import decode_body
from router.api.dialects.tolerant import tolerant
from router.api.openai.answers import Heading
from router.api.pooled.types import (
    Body,
    Document,
    Embedding,
    Embeddings,
    EmbeddingsBody,
    PairsBody,
    PooledUsage,
    Rank,
    Ranks,
    RerankBody,
    Score,
    ScoreBody,
    Scores,
)
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Call, Prompt
from router.requests.frontend import Frontend, Models
from router.requests.request import Finished, GenerateRequest, Piece

NO_LENGTH: Final = 1e-8  # of an embedding of zeros, as vLLM takes it


class PooledAnswer(Answer):
    """What each input gave, in the order of the inputs. Nothing of it streams."""

    def __init__(self, heading: Heading, body: Any, num_inputs: int) -> None:
        self._heading = heading
        self._body = body
        self._results: list[Any] = [None] * num_inputs

    def add(self, piece: Piece) -> None:
        self._results[piece.index] = self._result(piece.pooled)

    def whole(self, finished: Finished) -> Struct:
        return self._whole(PooledUsage(finished.tokens.prompt_tokens, finished.tokens.prompt_tokens))

    def _result(self, pooled: bytes) -> Any:
        raise NotImplementedError

    def _whole(self, usage: PooledUsage) -> Struct:
        raise NotImplementedError


class EmbeddingsAnswer(PooledAnswer):
    _body: EmbeddingsBody

    def _result(self, pooled: bytes) -> str | Raw:
        """Written at once, because all of a call's numbers together would keep other requests waiting."""
        if self._body.encoding_format == "base64":
            return b64encode(pooled).decode()
        return Raw(msgspec.json.encode(np.frombuffer(pooled, "<f4").tolist()))

    def _whole(self, usage: PooledUsage) -> Struct:
        data = [Embedding(index, result) for index, result in enumerate(self._results)]
        return Embeddings(self._heading.id, self._heading.created, self._heading.model, data, usage)


class PairsAnswer(PooledAnswer):
    """The inputs are pairs, or their texts as PairsBody.embedded has them."""

    def __init__(self, heading: Heading, body: PairsBody, num_inputs: int) -> None:
        super().__init__(heading, body, num_inputs)
        self._queries, self._documents = body.texts()
        self._embedded = num_inputs > len(self._documents)

    def _result(self, pooled: bytes) -> Any:
        values = np.frombuffer(pooled, "<f4")
        return values / max(float(np.linalg.norm(values)), NO_LENGTH) if self._embedded else float(values[0])

    def _scores(self) -> list[float]:
        if not self._embedded:
            return self._results
        documents, queries = self._results[: len(self._documents)], self._results[len(self._documents) :]
        pairs = zip(queries * (len(documents) // len(queries)), documents, strict=True)
        return [float(query @ document) for query, document in pairs]


class ScoreAnswer(PairsAnswer):
    def _whole(self, usage: PooledUsage) -> Struct:
        data = [Score(index, score) for index, score in enumerate(self._scores())]
        return Scores(self._heading.id, self._heading.created, self._heading.model, data, usage)


class RerankAnswer(PairsAnswer):
    _body: RerankBody

    def _whole(self, usage: PooledUsage) -> Struct:
        scores = self._scores()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n or None]
        shown = [Document(self._documents[index]) if self._body.return_documents else None for index in order]
        ranks = [Rank(index, scores[index], document) for index, document in zip(order, shown, strict=True)]
        return Ranks(self._heading.id, self._heading.model, ranks, usage)


class PooledDialect(Dialect):
    def __init__(self, models: Models, body: type[Body], answer: type[PooledAnswer], prefix: str) -> None:
        """`prefix`: of the answer's id."""
        self._body = body if models.config.unknown_fields == "refuse" else tolerant(body)
        self._answer = answer
        self._prefix = prefix

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        body = decode_body(data, self._body)
        return body.asked(), Options(given={}), body.prompts()

    def fit(
        self, frontend: Frontend, call: Call, body: Any, prompts: Sequence[Prompt]
    ) -> tuple[Call, Sequence[Prompt]]:
        tasks = frontend.generator.limits().tasks
        if isinstance(body, PairsBody) and EMBED in tasks and SCORES not in tasks:
            return body.embedded(call)
        return call, prompts

    def answer(
        self, frontend: Frontend, asked: Asked, options: Options, request_id: str, requests: Sequence[GenerateRequest]
    ) -> PooledAnswer:
        heading = Heading(f"{self._prefix}-{request_id}", frontend.model, requests[0].draw.created_s)
        return self._answer(heading, asked.form, len(requests))


Make = Callable[[Models, object], PooledDialect]


def _made(body: type[Body], answer: type[PooledAnswer], prefix: str) -> Make:
    return lambda models, _: PooledDialect(models, body, answer, prefix)


EMBEDDINGS = _made(EmbeddingsBody, EmbeddingsAnswer, "embd")
SCORE = _made(ScoreBody, ScoreAnswer, "score")
RERANK = _made(RerankBody, RerankAnswer, "rerank")
DESCRIBED_EMBEDDINGS = ("Embeddings of texts or token ids", EmbeddingsBody, Embeddings)
DESCRIBED_SCORE = ("Scores of pairs of texts", ScoreBody, Scores)
DESCRIBED_RERANK = ("Documents in the order of their scores with a query", RerankBody, Ranks)
