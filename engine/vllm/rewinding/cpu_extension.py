"""vLLM imports this module on CPUs, in each process that samples: importing it lets seeded requests be wound back."""

import torch
from vllm.v1.sample.sampler import Sampler

from engine.vllm.rewinding.generator import RewindingGenerator, marking


class CpuExtension:
    """Adds nothing to vLLM's worker: vLLM imports the module for it (`worker_extension_cls`)."""


torch.Generator = RewindingGenerator  # type: ignore[misc]
Sampler.forward = marking(Sampler.forward)
