"""The families of models: one row for how each writes tool calls, one for how each marks its reasoning."""

from collections.abc import Collection
from dataclasses import dataclass

from router.parsing import call_formats
from router.parsing.call_writer import CallFormat
from router.parsing.xml_calls import qwen_coder


@dataclass(frozen=True, slots=True)
class ToolFamily:
    opens: tuple[str, ...]  # marks behind which calls stand, anywhere in the text
    body: CallFormat
    inner: tuple[str, ...] = ()  # marks within a call
    shown: str = ""  # a call of NAME with ARGUMENTS, for models that no chat template tells it; empty: it has to
    bare: tuple[str, ...] = ()  # what calls begin with when the text is nothing else, but for spaces; part of them


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    opens: str
    closes: str
    inner: tuple[str, ...] = ()  # added tokens that its marks are made of
    skips: tuple[str, ...] = ()  # marks between the parts of an answer, which say nothing
    heads: tuple[str, ...] = ()  # the same, with what stands behind them up to `head_end`
    head_end: str = ""
    next_part: str = ""  # what begins the next part of an answer
    answers: tuple[str, ...] = ()  # what may stand before an answer that has a format
    ends: str = ""  # what makes a model go on behind its reasoning; empty: `closes`, on a line of its own


@dataclass(frozen=True, slots=True)
class Sign:
    """A model that has all of `texts` in its chat template or among its added tokens is of the family."""

    family: str
    texts: tuple[str, ...]


_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

TOOL_FAMILIES = {
    "hermes": ToolFamily(
        ("<tool_call>",),
        call_formats.tagged_json,
        ("</tool_call>",),
        '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    ),
    "qwen3_coder": ToolFamily(("<tool_call>",), qwen_coder, ("</tool_call>",)),
    "llama3_json": ToolFamily(
        ("<|python_tag|>",),
        call_formats.bare_json,
        shown='{"name": "NAME", "parameters": ARGUMENTS}',
        bare=("{",),
    ),
    "pythonic": ToolFamily(("<|python_start|>",), call_formats.pythonic, ("<|python_end|>",), bare=("[",)),
    "mistral": ToolFamily(
        ("[TOOL_CALLS]",),
        call_formats.mistral,
        ("[ARGS]", "[CALL_ID]"),
        '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    ),
    "deepseek_v3": ToolFamily(
        ("<｜tool▁calls▁begin｜>",),
        call_formats.deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "harmony": ToolFamily(  # gpt-oss; the recipient may stand behind <|start|>assistant, which a prompt ends with
        ("<|channel|>commentary to=functions.", "<|channel|>analysis to=functions."),
        call_formats.harmony,
        _HARMONY,
        bare=("to=functions.",),
    ),
}
REASONING_FAMILIES = {
    "think": ReasoningFamily("<think>", "</think>"),
    "mistral": ReasoningFamily("[THINK]", "[/THINK]"),
    "harmony": ReasoningFamily(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        _HARMONY,
        skips=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
        ),
        heads=("<|channel|>final <|constrain|>", "<|channel|>commentary <|constrain|>"),
        head_end="<|message|>",
        next_part="<|start|>assistant",
        answers=("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
        ends="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}

MARKS = frozenset(text for family in TOOL_FAMILIES.values() for text in (*family.opens, *family.inner)) | frozenset(
    text for family in REASONING_FAMILIES.values() for text in (family.opens, family.closes, *family.inner)
)
"""What answers of any family are made of besides text."""

PLAIN_FAMILY = "hermes"
"""How a model is told to write calls whose chat template knows no tools, and which shows no other family's signs."""

TOOL_SIGNS = (
    Sign("qwen3_coder", ("<tool_call>", "<function=")),
    Sign("hermes", ("<tool_call>",)),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Sign("pythonic", ("[func_name1(params_name1=",)),  # as the templates of Llama 3.2 and 4 for it say
    Sign("llama3_json", ("<|python_tag|>",)),
    Sign("harmony", ("<|channel|>", "<|constrain|>", "<|call|>")),
)
REASONING_SIGNS = (
    Sign("think", ("<think>", "</think>")),
    Sign("mistral", ("[THINK]", "[/THINK]")),
    Sign("harmony", ("<|channel|>", "<|message|>", "<|end|>")),
)


def recognised(signs: tuple[Sign, ...], template: str, added_tokens: Collection[str]) -> str | None:
    """The first family whose signs the model has."""
    for sign in signs:
        if all(text in template or text in added_tokens for text in sign.texts):
            return sign.family
    return None
