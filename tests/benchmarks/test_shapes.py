"""The measured shapes are those of the models."""

from dataclasses import replace

import pytest

from benchmarks.shapes import SHAPES
from runtime.checkpoint.model_files import resolve_model


def test_the_shape_of_smollm2_is_that_of_the_model_that_is_installed() -> None:
    real, shape = resolve_model("smollm2").config, SHAPES["smollm2"]
    assert real.rms_norm_eps == pytest.approx(shape.rms_norm_eps)
    assert replace(real, rms_norm_eps=shape.rms_norm_eps, dtype=shape.dtype) == shape
