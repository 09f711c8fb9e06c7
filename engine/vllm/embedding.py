"""Embeddings by a vLLM whose model pools (`vllm: {runner: pooling}`)."""

from typing import Any, Final

import msgspec

from baton_proto.pooling import EMBED, GENERATE, Pooling

SCORES_ELSEWHERE: Final = "scores are a vLLM server's (external_workers), which makes the tokens of two texts"


def tasks_of(model_config: Any) -> tuple[str, ...]:
    """`model_config`: vLLM's."""
    return (GENERATE,) if model_config.pooler_config is None else (EMBED,)


def pooling_params(pooling: Pooling) -> Any:
    """Raises ValueError."""
    from vllm import PoolingParams

    if pooling.task != EMBED:
        raise ValueError(SCORES_ELSEWHERE)
    return PoolingParams(task=EMBED, **msgspec.json.decode(pooling.fields))


def embedding(pooled: Any) -> bytes:
    """`pooled`: a tensor [dimension]. f32 LE."""
    values: bytes = pooled.float().numpy().astype("<f4").tobytes()
    return values
