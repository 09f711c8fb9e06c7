"""Writes a small Llama or Qwen3 that says a given text, token for token and at any temperature.

    model = write_scripted_model(folder, "<think>\nHm.\n</think>\n\nHello.", HERMES)
    model = write_scripted_model(folder, {AFTER_TOOL: "Found it.", "true": call}, HARMONY)

So calls, thoughts, marks and halves of characters pass through a whole service as a real model writes them. `scripts`
maps conditions of Jinja, over what a chat template has, to texts; the first that holds speaks. The template writes one
token at the prompt's beginning that says which: `<|script_0|>` and so on. A prompt without one, as of completions, gets
the first script.

The tokenizer is byte-level: a token per byte in prompts, a token per piece of 1 to 16 bytes in scripts, and the added
tokens of a family with its own `special` flags. One layer of attention looks at the token before and at the script's
token; what comes next is a row of the head. `o_proj` copies, `down_proj` is zero. Where a token occurs twice, the
tokens before it must differ.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

AFTER_TOOL = "messages[-1].role == 'tool'"
HEAD_DIM = 64
THETA = 1e8  # the slowest pairs of a head turn so little that they see content, not distance
SHARP_PAIRS = 12  # the fastest pairs, by which a head sees the token before
SHARPNESS = 12.0
LOGIT = 100.0  # what a unit of evidence weighs
PIECE_BYTES = (3, 4, 5, 2, *range(6, 17), 1)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPELLED = dict(
    zip([*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173],
        map(chr, [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]), strict=True)
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a model of a family adds to its vocabulary, and how it writes prompts."""

    template: str
    special: Sequence[str]  # the first one ends a turn
    plain: Sequence[str] = ()  # added tokens with `special: false`
    ends: int = 1  # how many of `special` end an answer


def write_scripted_model(
    folder: Path, scripts: str | Mapping[str, str], family: Family, architecture: str = "qwen3", **overrides: Any
) -> Path:
    """Fills `folder` (created when missing) and returns it. A text without one of the family's end tokens at its end
    gets the first. `overrides` are keys of config.json."""
    told = {"true": scripts} if isinstance(scripts, str) else dict(scripts)
    marks = [*family.special, *family.plain]
    used: set[str] = set()
    said = [list(_pieces(_ended(text, family), marks, used)) for text in told.values()]
    own = sorted({piece for pieces in said for piece in pieces} - set(marks) - set(BYTES))
    chosen = [f"<|script_{index}|>" for index in range(len(said))]
    vocabulary = {text: index for index, text in enumerate([*BYTES, *own, *marks, *chosen])}
    folder.mkdir(parents=True, exist_ok=True)
    template = _chooser(list(told)) + family.template
    ends = [vocabulary[text] for text in family.special[: family.ends]]
    _write_tokenizer(folder, [*BYTES, *own], family, chosen, template)
    numbered = [[vocabulary[piece] for piece in pieces] for pieces in said]
    config, weights = _model(architecture, len(vocabulary), numbered, [vocabulary[text] for text in chosen])
    config |= {"eos_token_id": ends if len(ends) > 1 else ends[0]} | overrides
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _ended(text: str, family: Family) -> str:
    return text if text.endswith(tuple(family.special[: family.ends])) else text + family.special[0]


def _chooser(conditions: Sequence[str]) -> str:
    rows = [f"{{% {'el' * bool(index)}if {condition} %}}{{{{ '<|script_{index}|>' }}}}"
            for index, condition in enumerate(conditions)]  # fmt: skip
    return "".join(rows) + "{% endif %}"


def _pieces(text: str, marks: Sequence[str], used: set[str]) -> Iterator[str]:
    """Marks, and between them byte-level spellings of pieces, new ones where there is a choice."""
    for part in re.split(f"({'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})", text):
        if part in marks:
            yield part
            continue
        rest = "".join(_SPELLED[byte] for byte in part.encode())
        while rest:
            cuts = [rest[:size] for size in PIECE_BYTES if size <= len(rest)]
            piece = next((cut for cut in cuts if cut not in used), cuts[0])
            used.add(piece)
            rest = rest[len(piece) :]
            yield piece


def _write_tokenizer(folder: Path, pieces: Sequence[str], family: Family, chosen: Sequence[str], template: str) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = dict.fromkeys(family.special, True) | dict.fromkeys(family.plain, False) | dict.fromkeys(chosen, True)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added.items()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.special[0], "chat_template": template}
    _write_json(folder / "tokenizer_config.json", settings)


def _model(
    architecture: str, num_tokens: int, scripts: Sequence[Sequence[int]], chosen: Sequence[int]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Residual stream: [this token, the one before, the script's token], each one-hot over the known tokens, where
    place 0 is any other token and the last place is always 1."""
    known = {token: place for place, token in enumerate(sorted({*chosen, *(t for said in scripts for t in said)}), 1)}
    width = -(-(len(known) + 2) // HEAD_DIM) * HEAD_DIM
    one, hidden, heads = width - 1, 3 * width, 2 * width // HEAD_DIM
    vocab_size = -(-num_tokens // 64) * 64
    embeddings = np.zeros((vocab_size, hidden), np.float32)
    embeddings[:, one] = 1
    embeddings[np.arange(vocab_size), [known.get(token, 0) for token in range(vocab_size)]] = 1
    entry = (hidden / 2) ** 0.5  # of a one behind the first norm; behind the last: (hidden / 4) ** 0.5
    head = _evidence(scripts, chosen, known, width, vocab_size)
    weights = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": head * np.float32(LOGIT / (hidden / 4) ** 0.5),
    }
    layer = _attention([known[token] for token in chosen], width, heads, entry, architecture == "qwen3") | {
        "input_layernorm": np.ones(hidden),
        "post_attention_layernorm": np.ones(hidden),
        "mlp.gate_proj": np.zeros((HEAD_DIM, hidden)),
        "mlp.up_proj": np.zeros((HEAD_DIM, hidden)),
        "mlp.down_proj": np.zeros((hidden, HEAD_DIM)),
    }
    weights |= {f"model.layers.0.{name}.weight": value.astype(np.float32) for name, value in layer.items()}
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]],
        "model_type": architecture, "vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": HEAD_DIM,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD_DIM,
        "hidden_act": "silu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": THETA,
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    return config, weights


def _evidence(
    scripts: Sequence[Sequence[int]], chosen: Sequence[int], known: Mapping[int, int], width: int, vocab_size: int
) -> np.ndarray:
    """How much each place of the stream speaks for each next token. Raises ValueError when a script cannot be told."""
    head = np.zeros((vocab_size, 3 * width), np.float32)
    steps: list[tuple[int, list[int]]] = []
    for script, said in zip(map(known.__getitem__, chosen), scripts, strict=True):
        for place, token in enumerate(said):
            before = [known[said[index]] if index >= 0 else 0 for index in (place - 1, place - 2)]
            seen = [before[0], width + before[1], 2 * width + script]
            steps.append((token, seen))
            # The first one comes behind any prompt, also behind one that ends with a token of the script.
            of_script = (3.5, 2.5)[place] if place < 2 else 1
            head[token, seen[2]] = max(head[token, seen[2]], of_script)
            if place > 0:
                head[token, seen[0]] = 2
            if place > 1:
                head[token, seen[1]] = 2
    head[scripts[0][0], width - 1] = 0.25  # the first script where none is chosen
    for token, seen in steps:
        scores = head[:, [*seen, width - 1]].sum(axis=1)
        if np.argsort(scores)[-1] != token or np.sort(scores)[-2] > scores[token] - 0.4:
            raise ValueError(f"token {token} follows {seen}, and so does another: change the words of the script")
    return head


def _attention(chosen: Sequence[int], width: int, heads: int, entry: float, is_qwen3: bool) -> dict[str, np.ndarray]:
    """The first half of the heads copies the token before, the second the script's token. All queries, and the keys
    of the first half, are the same everywhere: rotation alone tells distances apart."""
    half, hidden, one = heads // 2, 3 * width, width - 1
    angles = THETA ** (-2 * np.arange(HEAD_DIM // 2) / HEAD_DIM)
    fast = np.arange(HEAD_DIM // 2) < SHARP_PAIRS
    before = np.concatenate([np.cos(angles) * fast, -np.sin(angles) * fast])  # a query that looks one place back
    key = np.concatenate([fast, 0 * fast]).astype(float)
    slow = np.concatenate([np.arange(HEAD_DIM // 2) >= HEAD_DIM // 2 - SHARP_PAIRS, 0 * fast]).astype(float)
    query, keys = np.zeros((heads, HEAD_DIM, hidden)), np.zeros((heads, HEAD_DIM, hidden))
    query[:half, :, one], keys[:half, :, one] = before, key
    query[half:, :, one], keys[half:, :, chosen] = slow, slow[:, None]
    values, output = np.zeros((heads * HEAD_DIM, hidden)), np.zeros((hidden, heads * HEAD_DIM))
    places = np.arange(width - 1)  # all but the one
    for at in (0, width):
        values[at + places, places] = 1
        output[width + at + places, at + places] = 1 / entry
    scale = SHARPNESS * HEAD_DIM**0.25 / entry
    layer = {
        "self_attn.q_proj": query.reshape(-1, hidden) * scale,
        "self_attn.k_proj": keys.reshape(-1, hidden) * scale,
        "self_attn.v_proj": values,
        "self_attn.o_proj": output,
    }
    if is_qwen3:
        norm = np.full(HEAD_DIM, SHARPNESS * HEAD_DIM**0.25 * (SHARP_PAIRS / HEAD_DIM) ** 0.5)
        layer |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    return layer


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
