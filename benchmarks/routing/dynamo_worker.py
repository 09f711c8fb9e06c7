"""A worker that Dynamo's KvRouter can choose: it serves an endpoint, announces the prompt's blocks, and idles.

    DYN_FILE_KV=FOLDER PEER/bin/python -m benchmarks.routing.dynamo_worker INPUTS

Runs in the peer's environment. It prints UP when discovery lists it, publishes when it reads a line, and ends when
stdin ends.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from dynamo._core import WorkerType  # type: ignore[import-not-found]
from dynamo.llm import (  # type: ignore[import-not-found]
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    compute_block_hash_for_seq,
    register_model,
)
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

from benchmarks.routing.dynamo_router import ENDPOINT
from benchmarks.routing.inputs import BLOCK_SIZE, MAX_TOKENS, read_tokens

MODEL = "benchmark"


async def main(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(ENDPOINT)
    serving = asyncio.ensure_future(endpoint.serve_endpoint(_answer))
    await asyncio.sleep(0.3)  # because a model is registered on an endpoint that serves
    limits = ModelRuntimeConfig()
    limits.total_kv_blocks, limits.max_num_seqs, limits.max_num_batched_tokens = 65536, 256, 8192
    await register_model(
        ModelInput.Tensor,
        ModelType.TensorBased,
        endpoint,
        MODEL,
        MODEL,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_SIZE,
        runtime_config=limits,
        tensor_model_config={"name": MODEL, "inputs": [], "outputs": []},
    )
    publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK_SIZE, enable_local_indexer=True)
    print("UP", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    tokens = read_tokens(folder, MAX_TOKENS).tolist()
    names = [name - 2**64 if name >> 63 else name for name in compute_block_hash_for_seq(tokens, BLOCK_SIZE)]
    publisher.publish_stored(tokens, [BLOCK_SIZE] * len(names), names)
    await loop.run_in_executor(None, sys.stdin.read)
    publisher.shutdown()
    serving.cancel()
    runtime.shutdown()


async def _answer(request: object) -> AsyncIterator[object]:
    yield request


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
