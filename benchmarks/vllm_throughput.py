"""vLLM's engine at what engine_throughput measures: the peer of its figures, on the same GPU.

    python -m benchmarks.vllm_throughput --model 30b-a3b [--fp8] [--kv-gb 34] [--section bench,decode1]

Runs where vLLM is installed, without a server. Weights are vLLM's dummy ones, but routers, norms and embeddings get
random numbers as large as a model's: dummy ones let all tokens choose the same few experts, whose weights alone are
then read. `--kv-gb`: memory for KV, for less time to start.
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from baton.bench.workload import NANO_VLLM_BENCH, random_ids
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES, sizes_of

SECTIONS = ("bench", "decode1", "decode256", "prefill")
NAMES = {"qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM", "gpt-oss": "GptOssForCausalLM"}
Prompt = tuple[list[int], int]  # token ids, and tokens to answer


def hugging_face_config(name: str) -> dict[str, Any]:
    """config.json of a shape, as transformers reads it."""
    shape = SHAPES[name]
    config = sizes_of(shape) | {
        "architectures": [NAMES[shape.architecture]],
        "model_type": {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}.get(shape.architecture, shape.architecture),
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape.architecture == "qwen3moe":
        config |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        config |= {"moe_intermediate_size": shape.expert_size, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if shape.architecture == "gpt-oss":
        config |= {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        config |= {
            "sliding_window": max(shape.windows),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5},
        }
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in shape.windows]
    return config


def choose_at_random(model: Any) -> None:
    """Gives routers, norms and embeddings random numbers as large as a model's."""
    import torch

    torch.manual_seed(0)
    for name, weights in model.named_parameters():
        spread = 0.1 if "norm" in name else 1.0 if "embed_tokens" in name else weights.shape[-1] ** -0.5
        if weights.itemsize == 1:  # has a scale beside it
            spread = 64.0
        if "norm" in name or "embed_tokens" in name or name.endswith(("router.weight", "mlp.gate.weight")):
            numbers = torch.randn(weights.shape, device=weights.device) * spread + float("norm" in name)
            weights.data.copy_(numbers.to(weights.dtype))


class Peer:
    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        self.llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=16384,
            kv_cache_memory_bytes=int(options.kv_gb * 1e9) if options.kv_gb else None,
            gpu_memory_utilization=0.9,
            disable_log_stats=True,
            quantization="fp8" if options.fp8 else None,
        )
        self.llm.apply_model(choose_at_random)
        self.dice = random.Random(1)

    def seconds(self, asks: list[Prompt]) -> float:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count, detokenize=False) for _, count in asks
        ]
        self.llm.reset_prefix_cache()
        began_s = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids, _ in asks], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [count for _, count in asks]
        return seconds

    def section(self, name: str, vocab_size: int) -> float:
        """Tokens per second."""

        def drawn(rows: int, length: int, count: int) -> list[Prompt]:
            return [([self.dice.randrange(10000) for _ in range(length)], count) for _ in range(rows)]

        if name == "bench":
            asks = random_ids(NANO_VLLM_BENCH, vocab_size)
            self.seconds(asks)
            return sum(count for _, count in asks) / self.seconds(asks)
        if name == "prefill":
            self.seconds(drawn(128, 1024, 1))
            return 128 * 1024 / self.seconds(drawn(128, 1024, 1))
        rows = int(name.removeprefix("decode"))
        few, more = (self.seconds(drawn(rows, 896, count)) for count in (8, 264))  # 1,024 tokens on average
        return 256 * rows / (more - few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[name for name, shape in SHAPES.items() if shape.architecture in NAMES])
    parser.add_argument("--fp8", action="store_true", help="weights of 8 bits")
    parser.add_argument("--kv-gb", type=float)
    parser.add_argument("--section", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hugging_face_config(options.model)))
        peer = Peer(options, folder)
        for name in options.section.split(","):
            results[name] = peer.section(name, SHAPES[options.model].vocab_size)
            print(f"vLLM {options.model}{' fp8' * options.fp8}, {name}: {results[name]:,.0f} tokens/s", flush=True)
    if options.json:
        write_result(options.json, {**describe(), "model": options.model, "fp8": options.fp8, "tokens_per_s": results})


if __name__ == "__main__":
    main()
