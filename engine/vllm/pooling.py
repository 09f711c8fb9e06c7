"""Embeddings and scores by a vLLM whose model pools (`vllm: {runner: pooling}`)."""

from typing import Any, Final

import msgspec

from baton_proto.pooling import EMBED, GENERATE, SCORE, Pooling

CLASSIFY: Final = "classify"  # vLLM's name of what scores a pair of texts
SCORERS: Final = "ForSequenceClassification"  # end of an architecture's name
TAKEN: Final = {EMBED: {"use_activation", "dimensions"}, SCORE: {"use_activation"}}


def tasks_of(model_config: Any) -> tuple[str, ...]:
    """`model_config`: vLLM's. Empty: it tells several labels apart, of which there is no score."""
    if model_config.pooler_config is None:
        return (GENERATE,)
    if model_config.convert_type != CLASSIFY and not model_config.architectures[0].endswith(SCORERS):
        return (EMBED,)
    return (SCORE,) if model_config.hf_config.num_labels == 1 else ()


def pooling_params(pooling: Pooling) -> Any:
    """Raises ValueError."""
    from vllm import PoolingParams

    fields = msgspec.json.decode(pooling.fields)
    if foreign := sorted(fields.keys() - TAKEN[pooling.task]):
        raise ValueError(f"{foreign[0]} is a vLLM server's (external_workers), which makes the tokens of two texts")
    return PoolingParams(task=EMBED if pooling.task == EMBED else CLASSIFY, **fields)


def pooled_bytes(pooled: Any) -> bytes:
    """`pooled`: a tensor [dimension], of a score [1] or []. f32 LE."""
    values: bytes = pooled.float().numpy().astype("<f4").tobytes()
    return values
