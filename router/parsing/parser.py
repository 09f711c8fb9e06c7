"""Takes one answer apart while it is written: text, reasoning and tool calls.

Its text shows the special tokens that families use as marks. What is no call after all becomes text, so nothing is
lost; a call whose name is told already keeps the arguments that it has, and what follows becomes text.
"""

from collections.abc import Callable

from router.parsing.call_formats import CallWriter, Schemas
from router.parsing.events import CallCut, Event, Reasoning, Text
from router.parsing.families import ReasoningFamily, ToolFamily
from router.parsing.reader import EndedError, MalformedError, Reader, Steps


class Parser:
    def __init__(
        self,
        tools: ToolFamily | None,
        reasoning: ReasoningFamily | None,
        new_id: Callable[[], str],
        schemas: Schemas | None = None,
        in_reasoning: bool = False,
    ) -> None:
        """in_reasoning: the prompt ends within the reasoning, which the chat template has opened."""
        self._tools = tools
        self._reasoning = reasoning
        self._in_reasoning = in_reasoning
        self._events: list[Event] = []
        self._reader = Reader()
        self._calls = CallWriter(self._events.append, new_id, schemas or {})
        self._cut = False
        self.reasons = False  # what comes next is reasoning, as far as is known
        self._steps = self._run()
        next(self._steps, None)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls

    def push(self, text: str) -> list[Event]:
        """What is certain now."""
        self._reader.push(text)
        next(self._steps, None)
        return self._taken()

    def end(self, cut: bool) -> list[Event]:
        """The last events. cut: the answer was stopped at its limit of tokens."""
        self._cut = cut
        self._reader.end()
        next(self._steps, None)
        return self._taken()

    def _taken(self) -> list[Event]:
        taken = self._events[:]
        self._events.clear()
        return taken

    def _text(self, text: str) -> None:
        self._events.append(Text(text))

    def _run(self) -> Steps[None]:
        reader, thinking, tools = self._reader, self._reasoning, self._tools
        if thinking is not None and self._in_reasoning:
            yield from self._reason(thinking)
        skips = thinking.skips if thinking else ()
        marks = (*(tools.opens if tools else ()), *((thinking.opens,) if thinking else ()), *skips)
        beginnings = tools.bare if tools else ()
        while True:
            if beginnings and (yield from reader.starts_with(beginnings)):
                yield from self._call()
            beginnings = ()
            mark = yield from reader.until(marks, self._text)
            if mark is None:
                return
            if mark in skips:
                beginnings = tools.bare if tools else ()
                continue
            if thinking is not None and mark == thinking.opens:
                yield from self._reason(thinking)
                beginnings = tools.bare if tools else ()
            else:
                yield from self._call(mark)

    def _reason(self, family: ReasoningFamily) -> Steps[None]:
        self.reasons = True
        yield from self._reader.until((family.closes,), lambda text: self._events.append(Reasoning(text)))
        self.reasons = False
        yield from self._reader.spaces()

    def _call(self, mark: str = "") -> Steps[None]:
        """Reads calls up to their end, or to where they are none."""
        assert self._tools is not None
        reader, calls = self._reader, self._calls
        reader.raw = [mark]
        before = calls.num_calls
        try:
            yield from self._tools.body(reader, calls)
        except MalformedError:
            self._give_back(before)
        except EndedError:
            if calls.is_open and self._cut:
                self._events.append(CallCut(calls.num_calls - 1))
            elif not self._cut:
                self._give_back(before)
        reader.raw, calls.is_open = None, False
        if calls.num_calls > before:
            yield from reader.spaces()

    def _give_back(self, calls_before: int) -> None:
        raw = "".join(self._reader.raw or ())
        if raw.strip() or self._calls.num_calls == calls_before:
            self._text(raw)
