"""For which numbers of tokens steps with prompts have CUDA graphs."""

from bisect import bisect_left

from hypothesis import given, strategies as st

from benchmarks.shapes import SHAPES
from engine.cuda.prompt_graphs import LARGEST, layer_weights, prompt_sizes


def test_the_sizes_of_an_8b_model_are_few_and_from_512_tokens_on_multiples_of_a_tile() -> None:
    sizes = prompt_sizes(8192, layer_weights(SHAPES["8b"]))
    assert len(sizes) == 24
    assert sizes[sizes.index(512) :] == list(range(512, 2049, 128))


def test_steps_of_a_large_model_that_keep_the_gpu_busy_have_no_graphs() -> None:
    assert layer_weights(SHAPES["8b"]) == 192_937_984
    assert prompt_sizes(8192, layer_weights(SHAPES["8b"]))[-1] == 2048
    assert prompt_sizes(8192, layer_weights(SHAPES["0.6b"]))[-1] == LARGEST


@given(st.integers(1, 16384), st.integers(1, 10**10))
def test_at_most_a_third_of_a_step_is_padding_up_to_the_longest_one_with_graphs(max_tokens: int, weights: int) -> None:
    sizes = prompt_sizes(max_tokens, weights)
    unlimited = prompt_sizes(max_tokens, 1)
    assert sizes == sorted(set(sizes))
    assert sizes == unlimited[: len(sizes)]
    assert unlimited[-1] == min(max_tokens, LARGEST)
    for num_tokens in range(65, sizes[-1] + 1, 7):
        size = sizes[bisect_left(sizes, num_tokens)]
        assert (size - num_tokens) / size <= 1 / 3
