"""Takes one answer apart while it is written: text, reasoning and tool calls.

Its text shows the special tokens that families use as marks. What is no call after all becomes text, so nothing is
lost; if its name is told already, the call is cut. So is a call that ends too early; its text is dropped when the
answer has met its limit of tokens, which its finish reason says.
"""

from collections.abc import Callable

from router.parsing.call_writer import CallWriter, Schemas
from router.parsing.events import Event, Reasoning, Text
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
        formatted: bool = False,
    ) -> None:
        """`in_reasoning`: the prompt ends within the reasoning, which the chat template has opened. `formatted`: marks
        stand before an answer's text and not within it."""
        self._tools = tools
        self._reasoning = reasoning
        self._in_reasoning = in_reasoning
        self._formatted = formatted
        self._events: list[Event] = []
        self._reader = Reader()
        self._calls = CallWriter(self._events.append, new_id, schemas or {})
        self._cut = False
        self.reasons = False  # what comes next is reasoning, as far as is known
        self._steps = self._run()
        next(self._steps, None)

    @property
    def num_calls(self) -> int:
        """Calls that are complete."""
        return self._calls.num_calls

    def push(self, text: str) -> list[Event]:
        """Returns the events that are certain now."""
        self._reader.push(text)
        next(self._steps, None)
        return self._taken()

    def end(self, cut: bool) -> list[Event]:
        """Returns the last events. `cut`: the answer was stopped at its limit of tokens."""
        self._cut = cut
        self._reader.end(cut)
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
        heads = thinking.heads if thinking else ()
        marks = (*(tools.opens if tools else ()), *((thinking.opens,) if thinking else ()), *skips, *heads)
        begins = True  # a part of the answer, which may be a call without a mark
        while True:
            if begins and tools is not None and tools.bare:
                yield from self._bare_call(tools)
            if self._formatted and not (yield from reader.starts_with(marks)):
                marks = ()
            mark = yield from reader.until(marks, self._text)
            if mark is None:
                return
            begins = True
            if thinking is not None and mark in heads:
                yield from reader.until((thinking.head_end,), lambda head: None)
            elif thinking is not None and mark == thinking.opens:
                yield from self._reason(thinking)
            elif mark not in skips:
                begins = False
                yield from self._call(mark)

    def _bare_call(self, family: ToolFamily) -> Steps[None]:
        """Calls, if they come next, perhaps behind spaces."""
        reader, read = self._reader, list[str]()
        reader.raw = read
        yield from reader.spaces()
        reader.raw, spaces = None, "".join(read)
        if (yield from reader.starts_with(family.bare)):
            yield from self._call(spaces)
        elif spaces:
            self._text(spaces)

    def _reason(self, family: ReasoningFamily) -> Steps[None]:
        self.reasons = True
        yield from self._reader.until((family.closes,), lambda text: self._events.append(Reasoning(text)))
        self.reasons = False
        yield from self._reader.spaces()

    def _call(self, before: str) -> Steps[None]:
        """Reads calls up to their end, or to where they are none. `before`: what is read of them already."""
        assert self._tools is not None
        reader, calls = self._reader, self._calls
        reader.raw, num_calls, is_text = [before], calls.num_calls, False
        try:
            yield from self._tools.body(reader, calls)
        except MalformedError:
            is_text = True
        except EndedError:
            is_text = not self._cut
        calls.cut()
        raw, reader.raw = "".join(reader.raw), None
        if is_text and raw.strip():
            self._text(raw)
        elif calls.num_calls > num_calls:
            yield from reader.spaces()
