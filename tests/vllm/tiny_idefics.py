"""A tiny random model that takes images: a vision tower before a Llama, and a processor for pictures of one size. Its
processor and vLLM's code for it do without torchvision, which PyPI has for a torch with CUDA alone."""

import base64
import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.tiny_model import VOCAB_SIZE, write_tiny_model

SIDE = 56  # pixels of a picture, in patches of PATCH
PATCH = 7
PATCHES = (SIDE // PATCH) ** 2  # tokens that a picture becomes, between others
MARK = "<image>"
ADDED = (MARK, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_idefics(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
        from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

        write_tiny_model(folder)
        know_images(folder)
        torch.manual_seed(0)
        shape: dict[str, Any] = {"num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
        shape["num_hidden_layers"] = 3
        seen = Idefics3VisionConfig(**shape, image_size=SIDE, patch_size=PATCH, initializer_range=0.5)
        text = LlamaConfig(
            **shape,
            num_key_value_heads=2,
            vocab_size=VOCAB_SIZE + len(ADDED),
            max_position_embeddings=2048,
            initializer_range=0.2,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        )
        config = Idefics3Config(vision_config=seen, text_config=text, image_token_id=VOCAB_SIZE, scale_factor=1)
        Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    edge = {"longest_edge": SIDE}
    picture = {"image_processor_type": "Idefics3ImageProcessor", "size": edge, "max_image_size": edge}
    _write(folder / "preprocessor_config.json", picture)
    made: dict[str, Any] = {"processor_class": "Idefics3Processor", "image_seq_len": PATCHES}
    _write(folder / "processor_config.json", made)
    return folder


def picture(colour: str, side: int = SIDE) -> str:
    """A data URL."""
    data = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def know_images(folder: Path) -> None:
    """The mark and its like are special tokens behind the vocabulary, and the chat template writes the mark."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] += [{"id": VOCAB_SIZE + i, "content": token} | flags for i, token in enumerate(ADDED)]
    _write(folder / "tokenizer.json", tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
