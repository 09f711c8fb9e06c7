"""The first token after a prefix that vLLM has offloaded to host memory, beside `host_tier`, which starts this.

    PYTHON -m benchmarks.vllm_offloading FOLDER TOKENS BLOCKS HOST_GIB      (a python that has vLLM)

FOLDER: a model without weights, which are made up. Prints one line of JSON: the seconds when the prefix is computed,
found in the device's cache, and found in host memory after other prompts have taken all BLOCKS of 64 tokens.
"""

import json
import os
import random
import statistics
import sys
import time

BLOCK_SIZE = 64


def main() -> None:
    folder, tokens, blocks, host_gib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=tokens + 8 * BLOCK_SIZE,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=blocks,
        kv_offloading_size=host_gib,
        enforce_eager=True,  # no step here has few tokens
        gpu_memory_utilization=0.5,
        disable_log_stats=True,
    )
    source = random.Random(0)

    def prompt() -> list[int]:
        return [source.randrange(3, 10_000) for _ in range(tokens)]

    def first_token_s(ids: list[int]) -> float:
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return time.perf_counter() - began

    first_token_s(prompt())
    computed = [first_token_s(prompt())]
    wanted = prompt()
    computed.append(first_token_s(wanted))
    device = min(first_token_s(wanted) for _ in range(3))
    host = []
    for _ in range(4):
        for _ in range(-(-blocks * BLOCK_SIZE // tokens)):
            first_token_s(prompt())
        host.append(first_token_s(wanted))
    print(
        json.dumps(
            {"computed s": min(computed), "device s": device, "host s": statistics.median(host), "host, all": host}
        )
    )


if __name__ == "__main__":
    main()
