"""Turns a caller's wish, from either API, into a GenerateRequest, or refuses it and names field and limit.

Invariant: no GenerateRequest fails later for a reason that lies in the request.
"""

import json
import math
import random
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, field

from baton_proto.grammar import Grammar
from baton_proto.images import MAX_URLS, Image
from baton_proto.pooling import GENERATE, Pooling
from baton_proto.sampling import MAX_SEED, SamplingParams
from baton_proto.worker import NO_HINT, CacheHint
from router.api.wishes.bad_words import spelled
from router.api.wishes.prompt_logprobs import check_prompt
from router.api.wishes.sampling_options import Options, check_in_vocabulary, check_range, check_sampling
from router.api.wishes.tool_use import ToolUse, answer_form, begin_chat, check_tools
from router.requests.draw import Draw
from router.requests.frontend import Frontend, Limits
from router.requests.request import GenerateRequest
from router.text.chat_template import Ending, Message
from router.text.text_encoder import TokenIds
from runtime.errors import ContextLengthError, InvalidRequestError, UnservedTaskError
from runtime.security.callers import ANY_TENANT, ANYONE, Caller

_dice = random.Random()  # request ids are unique, not secret

LOWEST_PRIORITY = -(2**31)
MAX_SALT_CHARS = 256
MIXTURE = "must be a string, token ids, or a list of either, not a mixture"
MAX_TIMEOUT_S = 86400.0
UNLIMITED = -1  # a budget for reasoning
MAX_MESSAGES = 4096
TRUNCATE = "truncate_prompt_tokens"
LONGEST = -1  # its value for as many tokens as fit
CUT_TIMES = 4  # so many times as long as it fits may a prompt be of which the last tokens are kept
MAX_CHARS_PER_TOKEN = 16  # on the average of a prompt; text has three to five
IN_PLACE_CHARS = 4096  # longer texts are tokenized in the side lane, so that no other request waits
IN_PLACE_BYTES = 64 * 1024  # longer bodies and messages are read and rendered there
MAX_VALUES = 256 * 1024  # numbers, texts, lists of one JSON text; they take 60 ns each, while no other thread runs
NAME_COST = 4  # a named value takes as long as so many others
CHARS_PER_STEP = 64  # that a template copies while it takes one step: a message, or a character of a variable
REQUEST_ID = re.compile(r"[!-~]{1,128}")
TENANT = re.compile(r"[!-~]{1,128}")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of a message -> its name in chat templates; OpenAI renamed `system` to `developer`."""


class Chat(Struct, frozen=True):
    """Messages for the model's chat template; `variables` are the template's own switches."""

    messages: Sequence[Message]
    variables: Mapping[str, Any] = {}
    variable_bytes: int = 0  # as JSON; tools and their calls count too
    tools: ToolUse | None = None  # None: the answer is text and nothing else
    thinking_tokens: int | None = None  # of reasoning, at most; checked by check_thinking
    ending: Ending = "answer"

    def num_chars(self) -> int:
        return sum(len(message["content"]) + len(message.get("reasoning_content", "")) for message in self.messages)

    def images(self) -> list[Image]:
        """Those of a stored conversation are JSON."""
        found = [image for message in self.messages for image in message.get("images", ())]
        return [image if isinstance(image, Image) else msgspec.convert(image, Image) for image in found]

    def steps(self) -> int:
        """Upper bound of the template's steps, if it looks at everything once."""
        return len(self.messages) + self.variable_bytes


class Pair(Struct, frozen=True):
    """Two texts whose score is asked for. A server makes their tokens; ours count as those of the prompt."""

    query: str
    document: str


Prompt = str | Chat | Pair | Sequence[int]


class Kept(Struct, frozen=True):
    """The tokens of a prompt that are kept. `number` LONGEST: as many as fit; None: all. They are the last ones; `side`
    names the side where they are cut, and without it a text keeps the special tokens before it."""

    number: int | None = None
    side: Literal["left", "right"] | None = None


ALL_TOKENS = Kept()


class Call(Struct, frozen=True, kw_only=True):
    """What a request says beside its prompt and its options."""

    request_id: str = ""  # see make_request_id
    prompt_field: str = "prompt"  # the caller's name of the prompt
    prompt_fields: Sequence[str] = ()  # of each of several, where they are not the entries of one field
    add_special_tokens: bool = True  # to a prompt that is a text, as training had it
    kept: Kept = ALL_TOKENS
    model: str | None = None
    priority: int = 0
    caller: Caller = ANYONE
    tenant: str = ""  # see tenant_of
    cache_salt: str = ""  # empty: none
    hint: CacheHint = NO_HINT
    timeout_s: float | None = None
    first_token_s: float | None = None  # until its first token is due
    draw: Draw = field(default_factory=Draw.fresh)
    pooling: Pooling | None = None  # asked for in the place of text


async def validate(frontend: Frontend, call: Call, prompt: Prompt, options: Options) -> GenerateRequest:
    """`frontend`: the model that the call names. Raises InvalidRequestError, and its kind ContextLengthError."""
    started_s = time.monotonic()
    _check_priority(call, frontend.config.max_priority)
    _check_salt(call.cache_salt)
    first_s = min(call.first_token_s or math.inf, (frontend.config.reject_ttft_ms or math.inf) / 1e3)
    timeout_s = frontend.config.request_timeout_s if call.timeout_s is None else min(call.timeout_s, MAX_TIMEOUT_S)
    sampling = check_sampling(options, frontend.tokenizer.vocab_size, frontend.sampling_defaults)
    seed = sampling.seed if sampling.is_seeded else call.draw.seed()
    limits = _limits(frontend, call)
    deadline_s = started_s + timeout_s
    if sampling.bad_words:
        sampling = await _with_spelled(frontend, sampling, options.name_of("bad_words"), deadline_s)
    if isinstance(prompt, Chat) and prompt.tools is not None:
        check_tools(prompt.tools, frontend.families)
    kept = _kept(call.kept, options, limits)
    images = prompt.images() if isinstance(prompt, Chat) else []
    if images:
        _check_with_images(frontend, call.prompt_field, images, kept, sampling, options)
    text = prompt, call.prompt_field, deadline_s, call.add_special_tokens, kept
    tokens = await tokenize(frontend, *text, limits=limits, sees=True)
    if images:
        tokens, images = frontend.tokenizer.images.place(call.prompt_field, tokens, images)
    given, use = sampling.grammar, prompt.tools if isinstance(prompt, Chat) else None
    parsing, grammar = None, given
    if isinstance(prompt, Chat) and use is not None:
        form = use, frontend.families, frontend.tokenizer
        parsing, grammar = answer_form(*form, tokens, given, prompt.thinking_tokens, prompt.ending == "continue")
    grammar_field = options.name_of("grammar") if given is not None else "tools"
    if grammar is not None:
        grammar = await _check_answer(frontend, grammar, given, grammar_field, use, deadline_s)
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    max_tokens = _check_length(call.prompt_field, len(tokens), options, limits, frontend.sampling_defaults)
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    check_prompt(options.name_of("prompt_logprobs"), len(tokens), sampling)
    if sampling.min_tokens > sampling.max_tokens:
        problem = f"is {sampling.min_tokens}, above the {sampling.max_tokens} tokens that may be generated"
        raise InvalidRequestError("min_tokens", problem)
    choices = range(1 if options.n is None else options.n)
    return GenerateRequest(
        request_id=call.request_id,
        prompt=tokens,
        sampling=tuple(msgspec.structs.replace(sampling, seed=(seed + i) & MAX_SEED) for i in choices),
        stop=tuple(options.stop),
        deadline_s=deadline_s,
        first_by_s=min(deadline_s, started_s + first_s),
        priority=call.priority,
        account=frontend.rate_limits.account(call.caller),
        tenant=call.tenant,
        hash_seed=frontend.hash_seed(call.tenant, call.cache_salt),
        hint=call.hint,
        images=images,
        pooling=_pooling(call, prompt),
        adapter=frontend.adapter,
        parsing=parsing,
        grammar_field=grammar_field,
        includes_stop=options.includes_stop,
        spells_special=options.spells_special,
        draw=call.draw,
    )


def _check_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequestError("cache_salt", f"has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed")


def _limits(frontend: Frontend, call: Call) -> Limits:
    """Raises UnservedTaskError."""
    limits, task = frontend.generator.limits(), GENERATE if call.pooling is None else call.pooling.task
    if limits.tasks and task not in limits.tasks:
        raise UnservedTaskError(frontend.model, task, limits.tasks)
    return limits if call.pooling is None else msgspec.structs.replace(limits, output=0)


def _pooling(call: Call, prompt: Prompt) -> Pooling | None:
    if call.pooling is None or not isinstance(prompt, Pair):
        return call.pooling
    return msgspec.structs.replace(call.pooling, texts=[prompt.query, prompt.document])


def _check_with_images(
    frontend: Frontend, name: str, images: Sequence[Image], kept: Kept, sampling: SamplingParams, options: Options
) -> None:
    """Raises InvalidRequestError for addresses, which no server shall fetch, for too many bytes, for a template that
    knows no images, and for what would need their tokens before a server has made them."""
    if not all(image.name for image in images):
        raise InvalidRequestError(name, "have images by address, which are not fetched here: send data URLs")
    if (size := sum(len(image.url) for image in images)) > MAX_URLS:
        raise InvalidRequestError(name, f"have images of {size} characters in Base64; at most {MAX_URLS} are allowed")
    frontend.tokenizer.images.mark(name)
    if kept.number is not None:
        raise InvalidRequestError(TRUNCATE, "cannot be had with images")
    if sampling.prompt_logprobs is not None:
        raise InvalidRequestError(options.name_of("prompt_logprobs"), "cannot be had with images")


async def _with_spelled(frontend: Frontend, sampling: SamplingParams, name: str, deadline_s: float) -> SamplingParams:
    spell = partial(spelled, frontend.tokenizer, sampling.bad_words, name)
    at_once = sum(map(len, sampling.bad_words)) <= IN_PLACE_CHARS
    ids = spell() if at_once else await frontend.lane.run(deadline_s, spell)
    return msgspec.structs.replace(sampling, bad_word_ids=ids)


def make_request_id(wanted: str | None, name: str = "request_id") -> tuple[str, str]:
    """(the id that the caller sees, the id of the work). The second is unique even when a caller repeats the first.
    `name`: the caller's name of the id.

    Raises InvalidRequestError.
    """
    if not wanted:
        request_id = f"{_dice.getrandbits(96):024x}"
        return request_id, request_id
    if not REQUEST_ID.fullmatch(wanted):
        raise InvalidRequestError(name, "must be 1 to 128 visible ASCII characters")
    return wanted, f"{wanted}-{_dice.getrandbits(32):08x}"


def seconds_of(name: str, text: str | None, per_s: int = 1) -> float | None:
    """A time that a header gives in seconds, or in milliseconds (`per_s` 1000); None stays None. Raises
    InvalidRequestError."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError as error:
        unit = "seconds" if per_s == 1 else "milliseconds"
        raise InvalidRequestError(name, f"is {text[:100]!r}, must be a number of {unit}") from error
    check_range(name, number, 0.0, MAX_TIMEOUT_S * per_s, open_below=True)
    return number / per_s


def tenant_of(caller: Caller, where: str, named: str | None) -> str:
    """The tenant of the caller's key. What the request itself names at `where` counts where the key lets it. Raises
    InvalidRequestError."""
    if caller.tenant != ANY_TENANT:
        return caller.tenant or ""
    if named and not TENANT.fullmatch(named):
        raise InvalidRequestError(where, "must be 1 to 128 visible ASCII characters")
    return named or ""


def _check_priority(call: Call, default: int) -> None:
    highest = default if call.caller.max_priority is None else call.caller.max_priority
    check_range("priority", call.priority, LOWEST_PRIORITY, None)
    if call.priority > highest:
        way_out = "router.max_priority, and max_priority= in the line of a key, allow more"
        raise InvalidRequestError("priority", f"is {call.priority}, must be at most {highest}; {way_out}")


def check_thinking(name: str, budget: int | None) -> int | None:
    """Raises InvalidRequestError."""
    if budget == UNLIMITED:
        return None
    if budget is not None and budget < 1:
        problem = f"is {budget}, must be at least 1; the chat template's enable_thinking switches thinking off"
        raise InvalidRequestError(name, problem)
    return budget


def plain_role(where: str, role: str) -> str:
    """The role that the chat template sees. Raises InvalidRequestError."""
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role", f"is {role[:100]!r}, must be one of {', '.join(ROLES)}")
    return ROLES[role]


async def _check_grammar(frontend: Frontend, grammar: Grammar, name: str, deadline_s: float) -> Grammar:
    if frontend.grammars is None:
        raise InvalidRequestError(name, "is not supported here")
    return await frontend.grammars.check_soon(grammar, name, deadline_s, frontend.grammar_lane)


async def _check_answer(
    frontend: Frontend, whole: Grammar, given: Grammar | None, name: str, use: ToolUse | None, deadline_s: float
) -> Grammar:
    """`whole`: of `given`, the caller's grammar, and of the tools together. Where that cannot be followed, they are
    tried one by one."""
    try:
        return await _check_grammar(frontend, whole, name, deadline_s)
    except InvalidRequestError:
        if given is not None:
            await _check_grammar(frontend, given, name, deadline_s)
        if use is None or not use.told:
            raise
        for tool, schema in use.schemas().items():
            index = [each["function"]["name"] for each in use.tools].index(tool)
            alone = Grammar("json_schema", json.dumps(schema))
            await _check_grammar(frontend, alone, use.schema_fields[index], deadline_s)
        problem = "make a grammar that cannot be followed; give fewer tools, or simpler schemas"
        raise InvalidRequestError("tools", problem) from None


async def tokenize(
    frontend: Frontend,
    prompt: Prompt,
    name: str,
    deadline_s: float | None = None,
    add_special_tokens: bool = True,
    kept: Kept = ALL_TOKENS,
    *,
    limits: Limits | None = None,
    sees: bool = False,
) -> TokenIds:
    """One token or more. `name`: the caller's name of the prompt; `add_special_tokens`: to a text, as training had it;
    `kept`: a number, or all; `sees`: images count as marks of the template. Raises InvalidRequestError, and what the
    side lane raises."""
    if not sees and isinstance(prompt, Chat) and prompt.images():
        raise InvalidRequestError(name, "have images, which have no tokens before a server has made them")
    limits = limits or frontend.generator.limits()
    if kept.number is None:
        return await _tokenize(frontend, prompt, name, deadline_s, add_special_tokens, limits)
    limits = Limits(CUT_TIMES * limits.longest)
    tokens = await _tokenize(frontend, prompt, name, deadline_s, add_special_tokens, limits)
    if kept.side == "right":
        return tokens[: kept.number]
    special = frontend.tokenizer.encode("") if isinstance(prompt, str) and add_special_tokens else tokens[:0]
    if kept.side is not None or not 0 < len(special) < kept.number < len(tokens):
        return tokens[-kept.number :]
    return np.concatenate([special, tokens[len(special) - kept.number :]])


async def _tokenize(
    frontend: Frontend, prompt: Prompt, name: str, deadline_s: float | None, add_special_tokens: bool, limits: Limits
) -> TokenIds:
    tokenizer = frontend.tokenizer
    if isinstance(prompt, Pair):
        told = name, deadline_s, add_special_tokens, limits
        return np.concatenate([await _tokenize(frontend, text, *told) for text in (prompt.query, prompt.document)])
    if isinstance(prompt, Chat) and not prompt.messages:
        raise InvalidRequestError(name, "is empty; at least one message is needed")
    if not isinstance(prompt, Chat) and not len(prompt):
        raise InvalidRequestError(name, "is empty; at least one token is needed")
    if not isinstance(prompt, str | Chat):
        _check_fits(name, len(prompt), limits)
        return _check_token_ids(prompt, name, tokenizer.vocab_size)
    num_chars = prompt.num_chars() if isinstance(prompt, Chat) else len(prompt)
    max_chars = limits.longest * min(tokenizer.max_token_chars, MAX_CHARS_PER_TOKEN)
    if num_chars > max_chars:  # it would take seconds to say how many tokens they are
        problem = (
            f"has {num_chars} characters, more than the {max_chars} that are read here; {_who_takes(limits)} tokens"
        )
        raise ContextLengthError(name, problem)
    if isinstance(prompt, Chat):
        tokens = await _tokenize_chat(frontend, prompt, name, max_chars, deadline_s, limits)
    elif num_chars <= IN_PLACE_CHARS:
        tokens = tokenizer.encode(prompt, add_special_tokens)
    else:
        tokens = await frontend.lane.run(deadline_s, tokenizer.encode, prompt, add_special_tokens)
    if not len(tokens):
        raise InvalidRequestError(name, "gives no tokens; at least one is needed")
    return tokens


async def _tokenize_chat(
    frontend: Frontend, chat: Chat, name: str, max_chars: int, deadline_s: float | None, limits: Limits
) -> TokenIds:
    tokenizer, families = frontend.tokenizer, frontend.families
    begin = partial(begin_chat, chat.tools, families, tokenizer, chat.messages, chat.variables, max_chars, chat.ending)
    at_once = chat.num_chars() + chat.steps() * CHARS_PER_STEP <= IN_PLACE_BYTES
    text = begin() if at_once else await frontend.lane.run(deadline_s, begin)
    _check_fits(name, len(text.segments) - 1, limits, at_least="at least ")  # each but the first begins with a token
    if text.num_chars <= IN_PLACE_CHARS:
        return tokenizer.finish_chat(text)
    return await frontend.lane.run(deadline_s, tokenizer.finish_chat, text)


def _check_token_ids(prompt: Sequence[int], name: str, vocab_size: int) -> TokenIds:
    try:
        tokens = np.frombuffer(array("I", prompt), dtype=np.uint32)
    except TypeError:
        raise InvalidRequestError(name, MIXTURE) from None
    except OverflowError:  # negative, or more than 32 bits
        check_in_vocabulary(name, prompt, vocab_size)
        raise
    if tokens.max() >= vocab_size:
        check_in_vocabulary(name, prompt, vocab_size)
    return tokens


def _check_length(
    name: str, num_prompt_tokens: int, options: Options, limits: Limits, defaults: Mapping[str, Any]
) -> int:
    """Returns how many tokens may be generated: the caller's number, else the model's default as far as it fits, else
    all that fit."""
    _check_fits(name, num_prompt_tokens, limits)
    if not limits.output:
        return 0
    room, room_now = limits.longest - num_prompt_tokens, (limits.pool_tokens or 0) - num_prompt_tokens
    own = min(room, room_now) if room_now > 0 else room  # where the caller gives no number, whoever is there may serve
    max_tokens: int = options.given.get("max_tokens", min(own, defaults.get("max_tokens", own)))
    if max_tokens > room and options.cuts_max_tokens:
        return room
    if max_tokens > room:
        problem = f"is {max_tokens}, the prompt has {num_prompt_tokens} tokens; {_who_takes(limits)} in all"
        raise ContextLengthError(options.name_of("max_tokens"), problem)
    return max_tokens


def _kept(kept: Kept, options: Options, limits: Limits) -> Kept:
    """As a number of tokens, or all. Raises InvalidRequestError."""
    if kept.number == LONGEST:
        max_tokens: int = options.given.get("max_tokens", limits.output)
        return Kept(max(1, limits.longest - max(limits.output, max_tokens)), kept.side)
    if kept.number == 0:
        raise InvalidRequestError(TRUNCATE, "is 0, must be at least 1, or -1 for as many tokens as fit")
    check_range(TRUNCATE, kept.number, LONGEST, limits.longest - limits.output)
    return kept


def _check_fits(name: str, num_tokens: int, limits: Limits, at_least: str = "") -> None:
    """Prompt and one generated token must fit, if text is generated."""
    if num_tokens + limits.output <= limits.longest:
        return
    generated = ", with at least one to generate" if limits.output else ""
    problem = f"has {at_least}{num_tokens} tokens{generated}; {_who_takes(limits)}"
    raise ContextLengthError(name, problem)


def _who_takes(limits: Limits) -> str:
    if limits.longest < limits.max_model_len:
        return f"the largest worker takes {limits.longest}"
    return f"the model takes {limits.max_model_len}"
