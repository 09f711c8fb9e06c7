"""GPUs that workers hold, and how many there are for all."""

from baton.service.launcher import Machines, uses_gpus
from baton_proto.planner import DECODE, PREFILL, Role
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig, for_prefill_worker


def gpu_budget(config: ServingConfig, machines: Machines) -> int:
    """GPUs that the workers may hold together: the configured number, else all GPUs of the machines. Without GPUs a
    worker counts as one GPU, and the budget is the number of cores. Because the mock engine computes nothing, its
    budget is the sum of the limits of both roles."""
    limits = config.planner.limits
    if limits.gpu_budget is not None:
        return limits.gpu_budget
    if has_own_budget(config):
        return limits.max_prefill + limits.max_decode
    return machines.gpus if uses_gpus(config, machines) else machines.cores


def has_own_budget(config: ServingConfig) -> bool:
    """Whether workers of the model count for no other one's budget."""
    return config.planner.limits.gpu_budget is None and is_mock(config)


def gpus_per_worker(config: ServingConfig, machines: Machines) -> dict[Role, int]:
    """GPUs that a worker of each role holds; 1 where workers run without GPUs."""
    if not uses_gpus(config, machines):
        return {PREFILL: 1, DECODE: 1}
    return {PREFILL: for_prefill_worker(config).engine.tensor_parallel, DECODE: config.engine.tensor_parallel}


def gpus_together(config: ServingConfig, machines: Machines) -> int:
    """GPUs that the configured workers of one model hold."""
    return sum(count * config.workers.count(role) for role, count in gpus_per_worker(config, machines).items())
