"""Attention with Baton's own Triton kernels: on CUDA, and in tests on a CPU through Triton's interpreter."""

from dataclasses import dataclass
from math import inf
from typing import Final

import torch
from torch import Tensor

from engine.cuda.step_inputs import LayerInputs, StepInputs
from engine.kernels.attention.decode_attention import DecodeScratch, decode_attention
from engine.kernels.attention.prefill_attention import prefill_attention
from engine.kernels.attention.rotate_store import Rotation, rotate_store
from engine.kernels.attention.scores import Scores
from engine.model.attention import HeadNorms
from engine.model.rope import RotaryEmbedding
from engine.runners.step_shape import StepShape
from runtime.checkpoint.rope_config import Rope

STORED_ALONG: Final = 32  # decodes up to which attention stores their keys and values, too


@dataclass(frozen=True, slots=True)
class Angles:
    """Of layers that are rotated alike, for every position of a sequence."""

    table: Tensor  # float32 [positions, dim]: RotaryEmbedding.table
    query_scales: Tensor | None = None  # float32 [positions]

    @classmethod
    def of(cls, rope: Rope | None, num_positions: int, head_dim: int, device: torch.device) -> "Angles":
        """rope: None: heads are not rotated, which is a rotation by zero."""
        if rope is None:
            halves = torch.ones(num_positions, head_dim // 2, device=device)
            return cls(torch.cat((halves, torch.zeros_like(halves)), dim=-1))
        rotary = RotaryEmbedding(rope, device)
        return cls(rotary.table(num_positions), rotary.query_scale_table(num_positions))


class TritonAttention:
    """Implements `engine.model.attention.Attention`, of one layer or of several that attend alike."""

    table_from = inf  # pairs of a query and a key it sees from which on a step's chunks have one page table

    def __init__(self, angles: Angles, scratch: DecodeScratch, scores: Scores) -> None:
        self.num_positions = len(angles.table)
        self._angles = angles
        self._scratch = scratch
        self._scores = scores

    def is_repeatable(self, shape: StepShape) -> bool:
        """Whether QuickLaunch makes all launches of such a step, so that NotedLaunches has them."""
        return True

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs) -> Tensor:
        return rotate_store(qkv, layer_cache, self._rotation(norms, metadata))

    def store_and_decode(
        self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs
    ) -> Tensor:
        if len(qkv) > STORED_ALONG or metadata.shape.drafts:
            queries, rotation = self.store(qkv, norms, layer_cache, metadata), None
        else:
            queries, rotation = qkv, self._rotation(norms, metadata)
        plan = self._inputs(metadata).decode
        return decode_attention(queries, layer_cache, plan, self._scratch, rotation, scores=self._scores)

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        prefill_attention(queries, layer_cache, self._inputs(metadata).prefill, out, self._scores)

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        plan = self._inputs(metadata).decode
        decode_attention(queries, layer_cache, plan, self._scratch, out=out, scores=self._scores)

    def _inputs(self, metadata: StepInputs) -> LayerInputs:
        if not self._scores.window:
            return metadata.whole
        assert metadata.window is not None, "the step is laid out for the window"
        return metadata.window

    def _rotation(self, norms: HeadNorms | None, metadata: StepInputs) -> Rotation:
        query_norm, key_norm, eps = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        angles, slots = self._angles, self._inputs(metadata).slots
        return Rotation(slots, metadata.positions, angles.table, query_norm, key_norm, eps, angles.query_scales)
