"""Names a large file by its content without reading all of it: for cache keys and for `model_hash`."""

from pathlib import Path

import xxhash

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


def fingerprint(path: Path) -> str:
    """16 hex digits from the size and evenly spaced samples, the head and the tail among them: 4 MiB are read at most.

    The head of a .safetensors or .gguf file is its table of tensors; two sets of weights of one shape differ in nearly
    every sample. Raises OSError.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_64(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
