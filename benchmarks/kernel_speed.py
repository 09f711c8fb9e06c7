"""Speed of single kernels on one GPU, beside what memory and tensor cores allow, for choosing their parameters.

    python benchmarks/kernel_speed.py [--section ceilings,decode,prefill,elementwise,matmul,eight_bits,experts,sampler]

Times are medians of replays of a CUDA graph. Because the graph holds the kernel several times on different data, the
times contain neither launches nor hits of a warm cache.
"""

import argparse
import itertools
import statistics
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe, measure_ceilings, write_result
from engine.kernels.attention import (
    decode_attention as decode_kernel,
    decode_pieces,
    prefill_attention as prefill_kernel,
    rotate_store as rotate_kernel,
)
from engine.kernels.attention.decode_attention import DecodePlan, DecodeScratch
from engine.kernels.attention.decode_pieces import plan_pieces
from engine.kernels.attention.prefill_attention import PrefillPlan, plan_tiles
from engine.kernels.attention.rotate_store import Rotation, rotate_store
from engine.kernels.experts.expert_order import expert_order
from engine.kernels.experts.grouped_linear import SILU, grouped_linear
from engine.kernels.linear import small_linear as small_kernel
from engine.kernels.linear.fp8_linear import fp8_linear
from engine.kernels.linear.quantize_rows import quantize_rows
from engine.kernels.linear.small_linear import is_small, small_linear
from engine.kernels.linear.tile_product import Tiles
from engine.kernels.rms_norm import rms_norm
from engine.kernels.sampling import partial_buffer, sample
from engine.kernels.silu_mul import silu_mul
from engine.model.fp8_matrix import F8, Fp8Matrix
from engine.runners.auto import flash_is_available

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
Result = dict[str, Any]


def seconds(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Median time of one call. `calls` do the same on different data; together they read more than the cache holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        keep = [call() for call in calls]
        graph.capture_end()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(calls))
    del keep
    return statistics.median(times[1:])


def ceilings() -> list[Result]:
    found = measure_ceilings()
    return [
        {"kernel": "copy", "GB/s": found["copy_tb_s"] * 1e3},
        {"kernel": "matmul 8192^3", "TFLOP/s": found["matmul_tflop_s"]},
    ]


def _tables(lengths: list[int], block_size: int) -> tuple[Tensor, Tensor, int]:
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), device=DEVICE).int()
    starts = (torch.tensor(counts, device=DEVICE).cumsum(0) - torch.tensor(counts, device=DEVICE)).int()
    return order, starts, sum(counts)


def _decode_plan(lengths: list[int], block_size: int, programs: int) -> tuple[DecodePlan, int]:
    tables, starts, num_blocks = _tables(lengths, block_size)
    pieces = plan_pieces(np.array(lengths), len(lengths), programs)
    columns = {name: torch.from_numpy(array).to(DEVICE) for name, array in asdict(pieces).items()}
    return DecodePlan(**columns, table_start=starts, tables=tables), num_blocks


def decode() -> list[Result]:
    """Decode attention with the heads of the 0.6B (16/8) and of the 8B model (32/8), each of 128 values."""
    results = []
    source = np.random.default_rng(0)
    cases: dict[str, list[int]] = {
        f"x{rows} ctx {context}": [context + i % 7 for i in range(rows)]
        for rows, context in ((256, 1024), (1, 1024), (1, 32768), (32, 8192), (72, 8192))
    }
    cases |= {f"x{rows} ctx 300-1900": source.integers(300, 1900, rows).tolist() for rows in (16, 128)}
    configs = [(64, 2, 3), (64, 2, 2), (32, 2, 4), (64, 4, 3), (128, 4, 2)]
    grids = [33, 49, 66, 132]
    for heads, (case, lengths) in itertools.product((16, 32), cases.items()):
        for block_size in (16, 32, 64, 128):
            best: Result = {}
            tried = (
                list(itertools.product(configs, grids)) if block_size == 64 else [(configs[0], 33), (configs[0], 66)]
            )
            for (tile, warps, stages), programs in tried:
                try:
                    found = _time_decode(heads, 8, lengths, block_size, tile, warps, stages, programs)
                    found["kernel"] = f"decode {heads}/8 {case} block {block_size}"
                except Exception as error:
                    results.append({"kernel": f"decode tile {tile}x{warps}w{stages}s", "error": str(error)[:120]})
                    continue
                if not best or found["us"] < best["us"]:
                    best = found
                if block_size == 64:
                    print(f"    {case} {found['us']:.1f} us {found['config']}", flush=True)
            print(best, flush=True)
            results.append(best)
    return results


def _time_decode(
    heads: int, kv_heads: int, lengths: list[int], block_size: int, tile: int, warps: int, stages: int, programs: int
) -> Result:
    decode_pieces.TILE, decode_kernel.NUM_WARPS, decode_kernel.NUM_STAGES = tile, warps, stages
    plan, num_blocks = _decode_plan(lengths, block_size, programs)
    kv_bytes = sum(lengths) * kv_heads * 2 * 128 * 2
    layers = max(2, min(28, int(3e9 // kv_bytes)), -(-200_000_000 // kv_bytes))
    slab = torch.randn(layers, num_blocks, kv_heads, 2, block_size, 128, device=DEVICE, dtype=BF16)
    queries = torch.randn(len(lengths), heads, 128, device=DEVICE, dtype=BF16)
    scratch = DecodeScratch.allocate(len(lengths), programs, heads, kv_heads, 128, DEVICE)
    calls = [partial(decode_kernel.decode_attention, queries, cache, plan, scratch) for cache in slab]
    spent = seconds(calls)
    decode_pieces.TILE, decode_kernel.NUM_WARPS, decode_kernel.NUM_STAGES = _DEFAULTS
    return {
        "config": f"tile {tile} warps {warps} stages {stages} programs {programs}",
        "us": spent * 1e6,
        "GB/s": kv_bytes / spent / 1e9,
    }


_DEFAULTS = (decode_pieces.TILE, decode_kernel.NUM_WARPS, decode_kernel.NUM_STAGES)


def prefill() -> list[Result]:
    results = []
    for heads, lengths in itertools.product((16, 32), ([1024] * 16, [4096] * 4, [16384])):
        flops = sum(4 * length**2 / 2 * heads * 128 for length in lengths)
        for block_size in (16, 64, 128):
            tables, starts, num_blocks = _tables(lengths, block_size)
            slab = torch.randn(2, num_blocks, 8, 2, block_size, 128, device=DEVICE, dtype=BF16)
            queries = torch.randn(sum(lengths), heads + 16, 128, device=DEVICE, dtype=BF16)[:, :heads]
            name = f"prefill {heads}/8 {len(lengths)}x{lengths[0]} block {block_size}"
            for tile, key_tile, warps, stages in (
                (64, 64, 4, 3),
                (64, 64, 4, 2),
                (64, 128, 4, 2),
                (128, 64, 8, 3),
                (128, 128, 8, 2),
            ):
                prefill_kernel.HALF_TILES = (tile, key_tile, warps, stages)
                plan = _prefill_plan(lengths, tile, tables, starts)
                try:
                    spent = seconds(
                        [partial(prefill_kernel.prefill_attention, queries, cache, plan) for cache in slab], 4
                    )
                except Exception as error:
                    results.append({"kernel": name, "error": str(error)[:120]})
                    continue
                config = f"queries {tile} keys {key_tile} warps {warps} stages {stages}"
                results.append({"kernel": name, "config": config, "us": spent * 1e6, "TFLOP/s": flops / spent / 1e12})
                print(results[-1], flush=True)
            prefill_kernel.HALF_TILES = _PREFILL_DEFAULTS
            if flash_is_available(DEVICE, BF16):
                results.append(_time_flash(name, lengths, queries, slab, tables, block_size, flops))
                print(results[-1], flush=True)
    return results


_PREFILL_DEFAULTS = prefill_kernel.HALF_TILES


def _prefill_plan(lengths: list[int], tile: int, tables: Tensor, starts: Tensor) -> PrefillPlan:
    sizes = np.array(lengths)
    arrays = (*plan_tiles(sizes, tile), np.cumsum(sizes) - sizes, np.zeros(len(sizes)), sizes)
    return PrefillPlan(*(torch.from_numpy(array.astype(np.int32)).to(DEVICE) for array in arrays), starts, tables)


def _time_flash(
    name: str, lengths: list[int], queries: Tensor, slab: Tensor, tables: Tensor, block_size: int, flops: float
) -> Result:
    import flash_attn.cute as flash

    ends = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    cumulative = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    pages = tables.view(len(lengths), -1)

    def call(cache: Tensor) -> Any:
        return flash.flash_attn_varlen_func(
            queries,
            cache[:, :, 0].permute(0, 2, 1, 3),
            cache[:, :, 1].permute(0, 2, 1, 3),
            cu_seqlens_q=cumulative,
            max_seqlen_q=max(lengths),
            seqused_k=ends,
            page_table=pages,
            causal=True,
        )

    spent = seconds([partial(call, cache) for cache in slab], 4)
    return {"kernel": name, "config": "flash-attn-4", "us": spent * 1e6, "TFLOP/s": flops / spent / 1e12}


def elementwise() -> list[Result]:
    results = []
    for rows, (hidden, mlp, heads) in itertools.product((1, 256, 16384), ((1024, 3072, 16), (4096, 12288, 32))):
        many = 40 if rows < 1000 else 2
        weight = torch.randn(hidden, device=DEVICE, dtype=BF16)
        streams = [torch.randn(rows, hidden, device=DEVICE, dtype=BF16) for _ in range(many)]
        spent = seconds([partial(rms_norm, stream, weight, 1e-6) for stream in streams])
        results.append(_bandwidth(f"rms_norm {rows}x{hidden}", spent, 2 * rows * hidden * 2))
        gates = [torch.randn(rows, 2 * mlp, device=DEVICE, dtype=BF16) for _ in range(many)]
        spent = seconds([partial(silu_mul, g) for g in gates])
        results.append(_bandwidth(f"silu_mul {rows}x{mlp}", spent, 3 * rows * mlp * 2))
        blocks = -(-rows // 64) + 1
        slab = torch.zeros(many, blocks, 8, 2, 64, 128, device=DEVICE, dtype=BF16)
        qkv = torch.randn(many, rows, heads + 16, 128, device=DEVICE, dtype=BF16)
        positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        table = torch.randn(rows, 128, device=DEVICE)
        norm = torch.randn(128, device=DEVICE, dtype=BF16)
        calls = [
            partial(rotate_store, q, cache, Rotation(positions, positions, table, norm, norm, 1e-6))
            for q, cache in zip(qkv, slab, strict=True)
        ]
        defaults = (rotate_kernel.HEADS_AT_ONCE, rotate_kernel.WARPS_FOR_FEW, rotate_kernel.WARPS_FOR_MANY)
        for at_once, warps in ((8, 2), (8, 1), (8, 4), (4, 1), (16, 4), (16, 2), (32, 4)):
            rotate_kernel.HEADS_AT_ONCE = at_once
            rotate_kernel.WARPS_FOR_FEW = rotate_kernel.WARPS_FOR_MANY = warps
            found = _bandwidth(f"rotate_store {rows}x{heads}", seconds(calls), 2 * rows * (heads + 16) * 128 * 2)
            results.append(found | {"config": f"heads {at_once} warps {warps}"})
        rotate_kernel.HEADS_AT_ONCE, rotate_kernel.WARPS_FOR_FEW, rotate_kernel.WARPS_FOR_MANY = defaults
    for result in results:
        print(result, flush=True)
    return results


def _bandwidth(name: str, spent: float, nbytes: int) -> Result:
    return {"kernel": name, "us": spent * 1e6, "GB/s": nbytes / spent / 1e9}


def matmul() -> list[Result]:
    shapes = {
        "0.6b": {"qkv": (4096, 1024), "out": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
        "8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    }
    results = []
    for model, named in shapes.items():
        named = named | {"head": (151936, named["qkv"][1])}
        for name, (n, k) in named.items():
            copies = max(1, min(40, int(1.5e9 // (n * k * 2))))
            weights = torch.randn(copies, n, k, device=DEVICE, dtype=BF16) * k**-0.5
            for rows in (1, 2, 8, 16, 32, 64, 128, 256, 16384):
                if rows == 16384 and name == "head":
                    continue
                x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
                some = weights[: 4 if rows > 1000 else copies]
                cases = {"matmul": [partial(F.linear, x, w) for w in some]}
                if name in ("out", "down"):
                    stream = torch.randn(rows, n, device=DEVICE, dtype=BF16)
                    cases["addmm"] = [partial(stream.addmm_, x, w.t()) for w in some]
                for kind, calls in cases.items():
                    spent = seconds(calls)
                    results.append(
                        {
                            "kernel": f"{kind} {model} {name} {rows}x{n}x{k}",
                            "us": spent * 1e6,
                            "GB/s": (n * k + rows * (n + k)) * 2 / spent / 1e9,
                            "TFLOP/s": 2 * rows * n * k / spent / 1e12,
                        }
                    )
                    print(results[-1], flush=True)
                if is_small(x):
                    results += _small_variants(model, name, x, weights)
                    print(results[-1], flush=True)
            del weights
    return results


_SMALL_TILES = [(4096, 1), (8192, 1), (8192, 2), (8192, 4), (16384, 1)]


def _small_variants(model: str, name: str, x: Tensor, weights: Tensor) -> list[Result]:
    """Launch parameters of small_linear with what the model fuses into it; the fastest comes last."""
    rows, (_, n, k) = len(x), weights.shape
    tried: list[Result] = []
    norm = torch.randn(k, device=DEVICE, dtype=BF16)
    stream = torch.randn(rows, n, device=DEVICE, dtype=BF16)
    defaults = (small_kernel.TILE, small_kernel.MIN_WEIGHT_ROWS)
    for tile, weight_rows in _SMALL_TILES:
        small_kernel.TILE, small_kernel.MIN_WEIGHT_ROWS = tile, weight_rows
        if name in ("out", "down"):
            calls = [partial(small_linear, x, w, add_to=stream) for w in weights]
        elif name == "gate_up":
            calls = [partial(small_linear, x, w, norm=norm, eps=1e-6, gated=True) for w in weights]
        else:
            calls = [partial(small_linear, x, w, norm=norm, eps=1e-6) for w in weights]
        found = _bandwidth(f"small {model} {name} {rows}x{n}x{k}", seconds(calls, 4), n * k * 2)
        tried.append(found | {"config": f"tile {tile}, at least {weight_rows} rows"})
    small_kernel.TILE, small_kernel.MIN_WEIGHT_ROWS = defaults
    return sorted(tried, key=lambda result: -float(result["us"]))


_FP8_TILES = [(32, 256, 4, 5), (64, 256, 4, 4), (64, 128, 4, 6), (128, 128, 4, 5)]
_FP8_TILES += [(64, 256, 4, 4, True), (64, 128, 4, 6, True), (128, 128, 4, 4, True), (128, 128, 8, 4, True)]


def _eight_bits(*shape: int) -> Fp8Matrix:
    values = torch.randn(*shape, device=DEVICE, dtype=BF16).to(F8)
    return Fp8Matrix(values, torch.full((*shape[:-1], 1), 0.01, device=DEVICE))


def eight_bits() -> list[Result]:
    """Products of few rows with rows' scales: torch's, and fp8_linear with the fastest tiles. Both with what quantises
    the rows, gate and up with what makes one of both."""
    shapes = {
        "8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
        "30b-a3b": {"qkv": (5120, 2048), "out": (2048, 4096)},
    }
    results: list[Result] = []
    for model, named in shapes.items():
        for name, (n, k) in named.items():
            weights = [_eight_bits(n, k) for _ in range(max(2, int(3e8 // (n * k))))]
            gated, most_parts = name == "gate_up", 2 if name in ("out", "down") else 1
            for rows in (8, 32, 64, 128, 192, 256):
                x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
                label = f"{model} {name} {rows}x{n}x{k}"
                calls = [partial(_scaled_mm, x, w, gated) for w in weights]
                results.append(_bandwidth(f"scaled_mm {label}", seconds(calls), n * k))
                tried = []
                for rest, parts in itertools.product(_FP8_TILES, range(1, most_parts + 1)):
                    tiles = Tiles(max(16, min(128, rows)), *rest)
                    out = torch.empty(parts, rows, n // 2 if gated else n, device=DEVICE, dtype=BF16)
                    calls = [partial(_fp8_linear, x, w, out, gated, tiles) for w in weights]
                    config = {"config": f"{tiles}, {parts} parts"}
                    tried.append(_bandwidth(f"fp8_linear {label}", seconds(calls, 4), n * k) | config)
                results.append(min(tried, key=lambda result: float(result["us"])))
                print(*results[-2:], sep="\n", flush=True)
    return results


def _scaled_mm(x: Tensor, weight: Fp8Matrix, gated: bool) -> Tensor:
    values, scales = quantize_rows(x)
    product = torch._scaled_mm(
        values, weight.values.t(), scales, weight.scales.t(), out_dtype=BF16, use_fast_accum=True
    )
    return silu_mul(product) if gated else product


def _fp8_linear(x: Tensor, weight: Fp8Matrix, out: Tensor, gated: bool, tiles: Tiles) -> Tensor:
    return fp8_linear(quantize_rows(x), weight, out, gated=gated, tiles=tiles)


_EXPERT_TILES = [(16, 128, 64, 8, 4), (16, 128, 128, 4, 3), (16, 256, 128, 4, 2), (32, 128, 128, 4, 3)]
_EXPERT_TILES += [(32, 256, 64, 8, 3), (32, 256, 128, 4, 2), (64, 256, 64, 8, 3)]
_EXPERT_TILES += [(16, 128, 128, 8, 3, True), (16, 128, 128, 4, 3, True), (16, 256, 64, 8, 3, True)]


def experts() -> list[Result]:
    """One layer of Qwen3-30B-A3B, tokens that choose experts at random; the fastest tiles."""
    count, hidden, width, per_token = 128, 2048, 768, 8
    results: list[Result] = []
    for name, n, k in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        plain = [torch.randn(count, n, k, device=DEVICE, dtype=BF16) * k**-0.5 for _ in range(3)]
        for bits, weights in ((16, plain), (8, [_eight_bits(count, n, k) for _ in range(3)])):
            for rows in (16, 64, 128, 192, 256, 512):
                chosen = torch.rand(rows, count, device=DEVICE).topk(per_token).indices.int()
                order, pairs = expert_order(chosen, count), 1 if name == "down" else per_token
                x = torch.randn(rows * per_token // pairs, k, device=DEVICE, dtype=BF16)
                gate = SILU if name == "gate_up" else None
                tried = []
                for tiles in map(Tiles._make, _EXPERT_TILES):
                    calls = [
                        partial(grouped_linear, x, w, order, pairs_per_row=pairs, gate=gate, tiles=tiles)
                        for w in weights
                    ]
                    label = f"experts {name}, {bits} bits, {rows} tokens"
                    tried.append(_bandwidth(label, seconds(calls, 4), count * n * k * bits // 8))
                    tried[-1]["config"] = str(tiles)
                results.append(min(tried, key=lambda result: float(result["us"])))
                print(results[-1], flush=True)
    return results


def sampler() -> list[Result]:
    results = []
    for rows in (1, 32, 256):
        logits = [torch.randn(rows, 151936, device=DEVICE, dtype=BF16) for _ in range(4 if rows > 1 else 40)]
        scratch = partial_buffer(rows, 151936, DEVICE)
        out = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        seeds = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)
        for temperature in (0.0, 0.6):
            temperatures = torch.full((rows,), temperature, device=DEVICE)
            calls = [partial(sample, x, temperatures, seeds, out, scratch, out) for x in logits]
            results.append(_bandwidth(f"sample {rows} at {temperature}", seconds(calls), rows * 151936 * 2))
            print(results[-1], flush=True)
    return results


SECTIONS = {f.__name__: f for f in (ceilings, decode, prefill, elementwise, matmul, eight_bits, experts, sampler)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results: list[Result] = []
    with torch.inference_mode():
        for name in arguments.section.split(","):
            try:
                results += SECTIONS[name]()
            except Exception as error:
                traceback.print_exc()
                results.append({"kernel": name, "error": str(error)[:200]})
            torch.cuda.empty_cache()
    print()
    for result in results:
        numbers = "  ".join(f"{key} {value:,.1f}" for key, value in result.items() if isinstance(value, float))
        print(f"{result['kernel']:<48} {numbers}  {result.get('config', '')}{result.get('error', '')}")
    write_result(arguments.out / "kernel-speed.json", {"machine": describe(), "results": results})


if __name__ == "__main__":
    main()
