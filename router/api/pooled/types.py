"""Bodies and answers of embeddings, scores and ranks, as OpenAI and vLLM have them."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Raw, Struct

from baton_proto.pooling import EMBED, SCORE, Pooling
from router.api.dialects.dialect import Asked
from router.api.dialects.json_body import ABSENT
from router.api.wishes.names import Name
from router.api.wishes.validation import MIXTURE, Call, Kept, Pair, Prompt
from runtime.errors import InvalidRequestError

MAX_INPUTS = 2048  # of a call, as OpenAI has it


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that all share."""

    without_effect: ClassVar[Sequence[str]] = ("user",)
    task: ClassVar[str]
    passed: ClassVar[Sequence[str]] = ("use_activation",)
    prompt_field: ClassVar[str]

    model: Name | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: Raw = ABSENT

    def prompts(self) -> Sequence[Prompt]:
        """One or more. Raises InvalidRequestError."""
        raise NotImplementedError

    def asked(self) -> Asked:
        passed = {name: value for name in self.passed if (value := getattr(self, name)) is not None}
        call = Call(
            prompt_field=self.prompt_field,
            add_special_tokens=self.adds_special_tokens,
            request_id=self.request_id or "",
            kept=self.kept,
            model=self.model,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            pooling=Pooling(self.task, fields=msgspec.json.encode(passed)),
        )
        return Asked(call, stream=False, form=self)

    @property
    def adds_special_tokens(self) -> bool:
        return True

    @property
    def kept(self) -> Kept:
        """Of a prompt whose tokens are made here."""
        return Kept()


class EmbeddingsBody(Body, frozen=True, kw_only=True):
    task = EMBED
    passed = ("use_activation", "dimensions")
    prompt_field = "input"

    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool | None = None

    def prompts(self) -> Sequence[Prompt]:
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            whole: Any = self.input  # validation checks that all are token ids
            return [whole]
        if len(set(map(type, self.input))) > 1:
            raise InvalidRequestError("input", MIXTURE)
        _check_number("input", self.input)
        return [each for each in self.input if not isinstance(each, int)]

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False

    @property
    def kept(self) -> Kept:
        return Kept(self.truncate_prompt_tokens, self.truncation_side or "right")


class PairsBody(Body, frozen=True, kw_only=True):
    task = SCORE
    passed = (
        "use_activation",
        "truncate_prompt_tokens",
        "truncation_side",
        "max_tokens_per_query",
        "max_tokens_per_doc",
        "instruction",
    )

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None

    query_field: ClassVar[str]

    def texts(self) -> tuple[list[str], list[str]]:
        """Queries, of which there may be one for all, and documents. Raises InvalidRequestError."""
        queries, documents = (_listed(getattr(self, name)) for name in (self.query_field, self.prompt_field))
        _check_number(self.query_field, queries)
        _check_number(self.prompt_field, documents)
        if len(queries) not in (1, len(documents)):
            problem = f"has {len(queries)} texts, {self.prompt_field} {len(documents)}: one, or as many, are needed"
            raise InvalidRequestError(self.query_field, problem)
        return queries, documents

    def prompts(self) -> Sequence[Prompt]:
        queries, documents = self.texts()
        return [Pair(*pair) for pair in zip(queries * (len(documents) // len(queries)), documents, strict=True)]

    def embedded(self, call: Call) -> tuple[Call, Sequence[Prompt]]:
        """The texts one by one, documents first: a model that embeds tells their scores. Raises InvalidRequestError."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc", "instruction"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(name, "is known to vLLM servers alone (external_workers)")
        queries, documents = self.texts()
        told = [(self.prompt_field, i) for i in range(len(documents))]
        told += [(self.query_field, i) for i in range(len(queries))]
        fields = [f"{name}[{i}]" if isinstance(getattr(self, name), list) else name for name, i in told]
        kept = Kept(self.truncate_prompt_tokens, self.truncation_side or "right")
        call = msgspec.structs.replace(call, pooling=Pooling(EMBED), prompt_fields=fields, kept=kept)
        return call, documents + queries


class ScoreBody(PairsBody, frozen=True, kw_only=True):
    query_field = "text_1"
    prompt_field = "text_2"

    text_1: str | list[str]
    text_2: str | list[str]


class RerankBody(PairsBody, frozen=True, kw_only=True):
    query_field = "query"
    prompt_field = "documents"

    query: str
    documents: str | list[str]
    top_n: int = 0
    return_documents: bool = True

    def texts(self) -> tuple[list[str], list[str]]:
        if self.top_n < 0:
            raise InvalidRequestError("top_n", f"is {self.top_n}, must be at least 0, which is for all")
        return super().texts()


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _check_number(name: str, inputs: Sequence[object]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError(name, f"has {len(inputs)} entries; 1 to {MAX_INPUTS} are allowed")


class PooledUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True):
    index: int
    embedding: list[float] | str | Raw  # a string is Base64 of f32 LE
    object: str = "embedding"


class Score(Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class Embeddings(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage
    object: str = "list"


class Scores(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
    object: str = "list"


class Document(Struct, frozen=True):
    text: str


class Rank(Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranks(Struct, frozen=True):
    id: str
    model: str
    results: list[Rank]
    usage: PooledUsage
