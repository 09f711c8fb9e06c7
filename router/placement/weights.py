"""The numbers of the cost in router/placement/cost.py. Because nobody outside can set them well, they are constants."""

from typing import Final

import msgspec

from runtime.config.planner import TargetsConfig
from runtime.config.serving import PlacementConfig
from runtime.config.types import Positive, Weight

TARGETS: Final = TargetsConfig()


class Weights(PlacementConfig, frozen=True):
    """What the service's configuration says of placement, and the constants. Tests and simulations change them."""

    # A handoff from a prefill to a decode worker takes 2 ms, however short the prompt. Each token that the decode
    # worker lacks adds what is left of its KV's way when it is computed: between two H100 (NVLink) first tokens of an
    # 8B model came 2.6 ms later at 1k tokens, at once at 8k and 24 ms later at 32k.
    ship_ms: Weight = 2.0
    ship_token_ms: Weight = 0.0007
    # What a token takes from host memory (50 GB/s) and from disk (2.5 GB/s) to the device, until a worker has measured
    # it; at most what computing it takes.
    host_token_ms: Weight = 0.003
    disk_token_ms: Weight = 0.06
    # So many of a worker's decode steps are added to a request's time. Higher spreads what decodes more evenly.
    decode_steps: Weight = 8.0
    # Where there are prefill workers, a prompt delays the tokens of the requests beside it, of which cost.MOST_DELAYED
    # count. A ms of each of them costs so many ms of the prompt's own time. Higher keeps tokens even, lower brings
    # first tokens sooner.
    delay_weight: Weight = 0.25
    # A prefill worker may keep an answer, as a mixed one does. The first one costs so many of its decode steps, because
    # from then on its prompts have readers to wait for. Higher keeps tokens even, lower brings first tokens sooner.
    keep_steps: Weight = 12.0
    # What a prompt that is not cached costs those who come later, in parts for a part: so many times the mean queue
    # (that of a faster worker counts for more), at most the worker's own queue and a quarter of the prompt, and three
    # times the shortest queue, at most the prompt. So a cached prefix is worth the more, the fuller the workers are.
    # What its KV evicts comes on top, whatever the weight.
    crowd_weight: Weight = 4.0
    # A prefill worker with so many queued tokens gets no further request. While all have that many, a decode worker
    # without queued prompts runs one itself. At 16,384 one long prompt filled its worker, and prompts were computed
    # again elsewhere although to wait would have been sooner (docs/decisions.md). Without a limit tenants wait behind
    # each other's prompts at the workers, and blocks of decode workers are reserved for long.
    prefill_queue_tokens: Positive = 131_072
    # ServingConfig.step_targets, which say how long engines let a step beside answers last.
    ttft_ms: float = TARGETS.ttft_ms
    itl_ms: float = TARGETS.itl_ms

    @classmethod
    def of(cls, config: PlacementConfig, targets: TargetsConfig = TARGETS) -> "Weights":
        if isinstance(config, Weights):
            return config
        return cls(**msgspec.structs.asdict(config), ttft_ms=targets.ttft_ms, itl_ms=targets.itl_ms)
