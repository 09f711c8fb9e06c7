"""Keys that serving.yaml no longer has or that others have, and what a file that names one is told."""

from typing import Any

from runtime.config.step_times import StepTimes

CONSTANT = "is a constant now, because nobody outside can set it well: leave it out"
IN_STEP_TIMES = "stands in the section step_times now"

CONSTANTS = {
    "router": ("max_attempts", "response_ttl_s", "charge_sharing", "max_http_connections", "max_keep_cache_s"),
    "router.placement": (
        *("ship_ms", "ship_token_ms", "host_token_ms", "disk_token_ms", "decode_steps", "delay_weight", "crowd_weight"),
        *("prefill_queue_tokens", "charge_ttl_s", "expected_prefix_ttl_s", "temperature"),
    ),
    "engine": ("cuda_graphs",),
    "transfer": ("connect_timeout_s",),
    "workers": ("gather_ms", "gather_events_ms"),
    "discovery": ("ttl_s", "heartbeat_s"),
    "planner": (
        *("stale_s", "down_cooldown_s", "reversal_s", "reversals_per_hour", "journal_mb"),
        *("delays", "slo", "threshold"),
    ),
}

REPLACED = {
    "planner.delays.start_s": "is planner.start_s now",
    "planner.delays.start_deadline_s": "is five times planner.start_s now: set that one",
    "ray.capacity_timeout_s": "is twice planner.start_s now: set that one",
    "planner.slo.profile": IN_STEP_TIMES,
    "engine.host_kv_checksum": "is gone: blocks on disk are always checked, and those in host memory never",
    "engine.prepare_sleep": "is gone: a worker takes the host memory at its first sleep, and keeps it for later ones",
    "engine.prefill_batch_tokens": "is gone: engine.max_batch_tokens holds for all workers, and steps are as long as "
    "planner.targets.itl_ms allows",
    "router.max_buffered_bytes": "is 32 times router.max_body_bytes now: set that one",
    "engine.quantization": "is no key: engine.dtype takes fp8",
    "nats.token_file": "is gone: nats.credentials_file takes a file with a token, too",
    "telemetry": "is gone: the router sends traces where OTEL_EXPORTER_OTLP_ENDPOINT or "
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT names a collector",
    "telemetry.traces.endpoint": "is gone: the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT names it",
    "telemetry.traces.sample": "is gone: set OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
    "mock.speed_up": "is gone: divide the times in the section step_times by it",
    **{f"mock.{name}": IN_STEP_TIMES for name in StepTimes.__struct_fields__},
    **{f"{section}.{key}": CONSTANT for section, keys in CONSTANTS.items() for key in keys},
}


def told_of(key: str, value: Any) -> tuple[str, str] | None:
    """The key that left, `key` itself or one below it in `value`, with what it is told. None: it never was one."""
    if isinstance(value, dict):
        below = (told_of(f"{key}.{name}", inner) for name, inner in value.items())
        if found := next((one for one in below if one), None):
            return found
    section = key
    while section:
        if section in REPLACED:
            return key, REPLACED[section]
        section = section.rpartition(".")[0]
    return None
