"""The flags of whole_system, with what this machine suggests for those left out."""

import argparse
import os
import re
from pathlib import Path

from benchmarks.shapes import SHAPES
from benchmarks.whole.servers import VLLM, has_vllm
from benchmarks.whole.traces import AGENTS, CODE, CONVERSATIONS, KINDS

MOCK, TINY = "mock", "tiny"
RATES = {CONVERSATIONS: (2.0, 4.0, 6.0), AGENTS: (3.0, 6.0, 9.0), CODE: (8.0, 16.0, 24.0)}


def parsed(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", help=f"a folder, {MOCK}, {TINY}, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--tokenizer", type=Path, help="model folder whose vocabulary a shape gets; default: SmolLM2's")
    parser.add_argument("--gpus", type=int, help="workers of each system; default: this machine's GPUs, without any 2")
    parser.add_argument("--systems", type=_names, help="default: vllm,vllm:2048,mixed,split; without GPUs mixed,split")
    parser.add_argument("--traces", type=_names, default=list(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        metavar="[TRACE=]N,N",
        help="requests/s, of one trace or all; 2:1 is the rate 2 with the first seed alone",
    )
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--requests", type=int, help="of each load; default: --seconds times the rate")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each load")
    parser.add_argument("--warm-up", type=int, default=40, help="requests of each trace, before the loads")
    parser.add_argument("--longest", type=int, default=30_000, help="tokens of a request of a recorded trace")
    parser.add_argument("--conversations", type=Path, help="Mooncake's conversation trace, jsonl(.gz)")
    parser.add_argument("--code", type=Path, help="Azure's code trace, csv(.gz)")
    parser.add_argument("--vllm", default=VLLM, metavar="COMMAND", help=f"how vLLM is started; default: {VLLM}")
    parser.add_argument("--config", type=Path, help="serving.yaml of Baton's systems; default: as they come")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a request")
    parser.add_argument("--ready-s", type=float, default=420.0, help="for a system to start")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="runs.json of parts, instead of measuring"
    )
    parser.add_argument("--advise", action="store_true", help="compare with what `baton advise` expects")
    parser.add_argument("--profile", type=Path, help="of `baton profile --out`, for --advise; default: --config")
    parser.add_argument("--kv-tokens", type=int, default=524_288, help="KV memory of one GPU, for --advise")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("whole-system"), help="folder for runs.json and logs")
    arguments = parser.parse_args()
    if unknown := set(arguments.traces) - set(KINDS):
        parser.error(f"--traces: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    arguments.rates = _rates(arguments.rates, parser)
    _suit(arguments)
    return arguments


def _suit(arguments: argparse.Namespace) -> None:
    """Fills in what depends on the machine."""
    if arguments.merge:
        return
    import torch

    has_gpus = torch.cuda.is_available()
    arguments.gpus = arguments.gpus or torch.cuda.device_count() or 2
    if arguments.systems is None:
        peers = ["vllm", "vllm:2048"] if has_gpus and has_vllm(arguments.vllm) else []
        arguments.systems = [*peers, "mixed", "split"]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder


def _rates(texts: list[str], parser: argparse.ArgumentParser) -> dict[str, list[tuple[float, int | None]]]:
    """By trace (rate, how many of the seeds)."""
    rates: dict[str, list[tuple[float, int | None]]] = {kind: [(rate, None) for rate in RATES[kind]] for kind in KINDS}
    for text in texts:
        found = re.fullmatch(r"(?:(\w+)=)?([\d.]+(?::\d+)?(?:,[\d.]+(?::\d+)?)*)", text)
        if not found or found[1] not in (None, *KINDS):
            parser.error(f"--rates: {text!r} is no list such as 2,4 or agents=3:1,6")
        pairs = [part.partition(":") for part in found[2].split(",")]
        given = [(float(rate), int(seeds) if seeds else None) for rate, _, seeds in pairs]
        rates |= dict.fromkeys([found[1]] if found[1] else KINDS, given)
    return rates


def _names(text: str) -> list[str]:
    return text.split(",")
