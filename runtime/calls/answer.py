"""What a service answers, as plain dataclasses: fields as inference.proto has them, without protobuf."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from baton_proto.generated import inference_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    text: str
    logprob: float
    top: list[TopLogprob]


@dataclass(frozen=True, slots=True)
class Part:
    """What some of a chat's text means."""

    kind: str  # "content" | "reasoning" | "call_begun" | "call_arguments" | "call_cut"
    text: str = ""  # of content, reasoning and arguments
    index: int = 0  # of the call
    id: str = ""  # of a call that has begun, as is the next one
    name: str = ""


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""  # JSON of an object


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of choice `index`. `text` may lag behind `token_ids`: characters are never split, and what may become
    a stop string is held back."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str  # "stop" | "length" | "tool_calls" | "repetition" on the choice's last piece, else ""
    parts: list[Part] = field(default_factory=list)  # for chats that ask for them


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # "stop" | "length" | "tool_calls" | "repetition"; "" while it is being written
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens but the first
    content: str = ""  # this and what follows: of chats that ask for parts
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """What the next request of the chat says of this answer; a tool's result follows it. Of an answer in parts."""
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in self.tool_calls]
        said = {"content": self.content, "reasoning": self.reasoning, "tool_calls": calls}
        return {"role": "assistant"} | {name: value for name, value in said.items() if value}

    def add_part(self, part: Part) -> None:
        match part.kind:
            case "content":
                self.content += part.text
            case "reasoning":
                self.reasoning += part.text
            case "call_begun":
                self.tool_calls.append(ToolCall(part.id, part.name))
            case "call_arguments":
                self.tool_calls[part.index].arguments += part.text
            case "call_cut":
                del self.tool_calls[part.index :]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: their KV was there already


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(PromptTokens):
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion, for chats that ask for parts


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Who served one choice; the last ones, when workers failed meanwhile."""

    index: int
    decode_worker: str
    prefill_worker: str  # "": the decode worker ran the prompt itself
    kv_blocks: int  # shipped from prefill to decode
    kv_bytes: int
    transport: str  # "shm", "tcp", ...; "": nothing was shipped
    attempts: int  # 1 when no worker failed


@dataclass(slots=True)
class Answer:
    """An answer, as far as it has come. `text`, `token_ids`, `tool_calls`, `finish_reason` and `logprobs` are those of
    the first choice, which is the only one unless `n` asks for more."""

    request_id: str = ""
    model: str = ""
    choices: list[Choice] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)  # with the last piece
    served_by: list[ServedBy] = field(default_factory=list)  # with the last piece; one per choice
    ttft_s: float = 0.0  # from the call to the first token
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids if self.choices else []

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.choices[0].tool_calls if self.choices else []

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason if self.choices else ""

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return self.choices[0].logprobs if self.choices else []

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return self.choices[0].prompt_logprobs if self.choices else []

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 when there was no further token."""
        later = sum(len(choice.token_ids) for choice in self.choices) - len(self.choices)
        return later / (self.duration_s - self.ttft_s) if later > 0 and self.duration_s > self.ttft_s else 0.0

    def add(self, response: pb.GenerateResponse, elapsed_s: float) -> Piece | None:
        """Takes the next message of a Generate stream, `elapsed_s` after the call; returns the piece that came."""
        self.duration_s = elapsed_s
        match response.WhichOneof("event"):
            case "started":
                self.request_id, self.model = response.request_id, response.started.model
            case "finished":
                self.usage = plain(Usage, response.finished.usage)
                self.served_by = [plain(ServedBy, one) for one in response.finished.served_by]
            case "prompt_logprobs":
                told = response.prompt_logprobs
                self._choice(told.index).prompt_logprobs += [plain(TokenLogprob, one) for one in told.tokens]
            case "piece":
                piece = _piece(response.piece)
                if piece.token_ids and not self.ttft_s:
                    self.ttft_s = elapsed_s
                self._append(piece)
                return piece
        return None

    def _append(self, piece: Piece) -> None:
        choice = self._choice(piece.index)
        choice.text += piece.text
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        choice.finish_reason = piece.finish_reason
        for part in piece.parts:
            choice.add_part(part)

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]


def plain(kind: type[T], message: Message) -> T:
    """The message as the dataclass `kind`, which has fields of the same names."""
    return msgspec.convert(message_fields(message), kind, strict=False)  # not strict: inner 64-bit numbers are strings


def message_fields(message: Message) -> dict[str, Any]:
    """Every field of the message by name, default values included; its own 64-bit numbers stay numbers."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    wide = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    return fields | {one.name: getattr(message, one.name) for one in message.DESCRIPTOR.fields if one.cpp_type in wide}


def _piece(piece: pb.Piece) -> Piece:
    reason = piece.finish_reason
    return Piece(
        piece.index,
        piece.text,
        list(piece.token_ids),
        [plain(TokenLogprob, one) for one in piece.logprobs],
        pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if reason else "",
        list(map(_part, piece.parts)),
    )


def _part(part: pb.Part) -> Part:
    kind = part.WhichOneof("kind") or "content"
    value = getattr(part, kind)
    if isinstance(value, str):
        return Part(kind, value)
    return Part(kind, **{field.name: getattr(value, field.name) for field in value.DESCRIPTOR.fields})
