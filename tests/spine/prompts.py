"""Requests of the spine tests, given as token ids so that both sides see exactly the same prompt."""

import numpy as np

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from runtime.calls.router import Client
from tests.tiny_model import VOCAB_SIZE

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 100, 129, 255, 512, 777, 1000, 1500)


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens of the tiny model's vocabulary, no special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def greedy(tokens: list[int], max_tokens: int, **options: object) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=sampling)


async def ask(client: Client, tokens: list[int], max_tokens: int, timeout_s: float = 60, **options: object) -> Answer:
    return await client.generate(greedy(tokens, max_tokens, **options), timeout_s)
