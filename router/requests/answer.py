"""What one choice answers as its tokens arrive: its text, and its parts when the request asks for them."""

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.parsing.events import Arguments, CallBegun, CallCut, Event, joined
from router.parsing.parser import Parser
from router.parsing.parsing import Parsing
from router.requests.request import GenerateRequest, Parsed, Piece
from router.text.detokenizer import MAX_UNFINISHED
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer

REPETITION = "repetition_detected"  # a stop reason, as vLLM has it


class Answer:
    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest, index: int) -> None:
        parsing, sampling = request.parsing, request.sampling[index]
        self._index = index
        marks = frozenset[int]() if parsing is None else parsing.marks
        marks = tokenizer.hidden_token_ids if request.spells_special else marks
        self._text = OutputText(tokenizer, request.stop, sampling.min_tokens, marks, request.includes_stop)
        self._parts = None if parsing is None else _Parts(parsing, request.draw.call_ids(index))
        self._stops = sampling.stop_token_ids
        self._num_left = sampling.max_tokens
        self.weights = request.weights[index] if request.weights else 0  # that compute all of it; 0: it has no token
        self.turned = False  # the last tokens are not the engine's, which has to go on from them

    def take(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], finish: str | None, stop_token: int | None
    ) -> Piece:
        """Takes an engine's news, of which `token_ids` and `logprobs` keep what is accepted. When the budget for
        reasoning is used up, what ends the reasoning is added, and `turned` is set."""
        if self._parts is not None:
            return self._take_apart(self._parts, token_ids, logprobs, finish, stop_token)
        text, finish = self._text.take(token_ids, logprobs, finish, stop_token)
        reason = self._stop_reason(finish, stop_token)
        return Piece(self._index, token_ids, text, finish, logprobs, None, reason, weights=self.weights)

    def _take_apart(
        self,
        parts: "_Parts",
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: str | None,
        stop_token: int | None,
    ) -> Piece:
        texts: list[str] = []
        self.turned = False
        accepted, stopped = self._push(parts, token_ids, stop_token, texts)
        goes_on = not stopped and (finish is None or accepted < len(token_ids))
        del token_ids[accepted:], logprobs[accepted:]
        self._num_left -= accepted
        if goes_on and self._has_thought_enough(parts):
            forced = parts.end_thinking()[: self._num_left]
            added, stopped = self._push(parts, forced, None, texts)
            token_ids += forced[:added]
            logprobs += [TokenLogprobs(0.0, [])] * added if logprobs else []
            self._num_left -= added
            self.turned = bool(self._num_left) and not stopped
            finish = None if self._num_left else "length"
        if stopped:
            finish = "stop"
        if finish is not None:
            texts.append(self._text.flush())
            finish = parts.end(texts[-1], finish)
        reason = self._stop_reason(finish, stop_token)
        text = "".join(texts)
        return Piece(self._index, token_ids, text, finish, logprobs, parts.taken(), reason, weights=self.weights)

    def _stop_reason(self, finish: str | None, stop_token: int | None) -> int | str | UnsetType:
        """The model's own end is none."""
        if finish == "repetition":
            return REPETITION
        if finish in (None, "length"):
            return UNSET
        stop_token_of_request = UNSET if stop_token not in self._stops or stop_token is None else stop_token
        return self._text.stop_string or stop_token_of_request

    def _push(
        self, parts: "_Parts", token_ids: list[int], stop_token: int | None, texts: list[str]
    ) -> tuple[int, bool]:
        """Token by token, because each counts as reasoning or not. Stops where the reasoning has to end. Returns (how
        many are accepted, a stop string is complete)."""
        accepted = 0
        for place, token_id in enumerate(token_ids):
            is_stop = place == len(token_ids) - 1 and token_id == stop_token
            taken, text, stopped = self._text.push((token_id,), token_id if is_stop else None)
            accepted += taken
            parts.push(text)
            texts.append(text)
            if stopped:
                return accepted, True
            if self._has_thought_enough(parts):
                break
        return accepted, False

    def _has_thought_enough(self, parts: "_Parts") -> bool:
        """A character that the budget cuts is completed first: a grammar has no text in which it stays cut."""
        left = parts.thinking_left
        return left is not None and (left <= -MAX_UNFINISHED or (left <= 0 and not self._text.mid_character))


class _Parts:
    def __init__(self, parsing: Parsing, new_id: Callable[[], str]) -> None:
        self._parser: Parser = parsing.parser(new_id)
        self._one_call = parsing.one_call
        self._allowed = 0  # the index of the one call
        self._events: list[Event] = []
        self._reasoning_tokens = 0  # of the piece
        self._thinking_left = parsing.thinking_tokens
        self._end_of_thinking = parsing.end_of_thinking

    @property
    def thinking_left(self) -> int | None:
        """Tokens of the budget that the reasoning has left, if it goes on and has one."""
        return self._thinking_left if self._parser.reasons else None

    def end_thinking(self) -> list[int]:
        """The tokens that end it. That happens once: reasoning that the model begins anew has no budget."""
        self._thinking_left = None
        return list(self._end_of_thinking)

    def push(self, text: str) -> None:
        """The text of one token."""
        reasoned = self._parser.reasons
        self._add(self._parser.push(text))
        reasons = reasoned or self._parser.reasons
        self._reasoning_tokens += reasons
        if self._thinking_left is not None:
            self._thinking_left -= reasons

    def end(self, text: str, finish: str) -> str:
        """Returns the finish reason."""
        self._add(self._parser.push(text) + self._parser.end(finish != "stop"))
        return "tool_calls" if finish == "stop" and self._parser.num_calls else finish

    def taken(self) -> Parsed:
        parsed = Parsed(joined(self._events), self._reasoning_tokens)
        self._events, self._reasoning_tokens = [], 0
        return parsed

    def _add(self, events: list[Event]) -> None:
        for event in events:
            if self._one_call and isinstance(event, CallBegun | Arguments | CallCut):
                if event.index > self._allowed:
                    continue
                self._allowed += isinstance(event, CallCut)  # the next one may stand in its place
            self._events.append(event)
