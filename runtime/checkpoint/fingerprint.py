"""Names a large file by samples of its content: for cache keys."""

from pathlib import Path

import xxhash

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


def fingerprint(path: Path) -> str:
    """16 hex digits from the file's size and evenly spaced samples, its head and its tail among them; 4 MiB are read at
    most. The head of a .safetensors or .gguf file is its table of tensors, and two sets of weights of one shape differ
    in nearly every sample. Raises OSError.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_64(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
