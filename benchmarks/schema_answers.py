"""Whether answers match their JSON schemas: random schemas, and a random model, whose answers are noise without them.

    python -m benchmarks.schema_answers [--schemas 1000] [--seed 1] [--json FILE]

The engine runs in this process, on a GPU where there is one. Greedy and seeded answers, some with min_tokens, top_p or
ignore_eos; jsonschema is the judge, with formats and the order of properties. One schema of ten has a keyword that no
grammar follows. Ends with 1 when an answer that was not cut by its limit of tokens does not match, or when a refusal
does not name the keyword and its path.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from baton import LLM
from benchmarks.machine import describe, write_result
from tests.baton.schema_answers import schema_answers
from tests.tiny_model import write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schema_answers", allow_abbrev=False)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--json", type=Path, help="where to write the record of the run")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-schemas-") as folder,
        LLM(write_tiny_model(Path(folder)), kv_memory="64MiB", threads=1) as llm,
    ):
        start_s = time.monotonic()
        found = schema_answers(llm, arguments.schemas, arguments.seed, arguments.max_tokens)
        seconds = round(time.monotonic() - start_s, 1)
    results = {"schemas": arguments.schemas, **asdict(found), "seconds": seconds}
    if arguments.json:
        settings = {"model": "tiny, random", "seed": arguments.seed, "max_tokens": arguments.max_tokens}
        record = {"benchmark": "schema_answers", **describe(), "settings": settings, "results": results}
        write_result(arguments.json, record)
    print(", ".join(f"{name} {value}" for name, value in results.items() if name != "wrong"))
    for why in found.wrong:
        print(f"WRONG  {why}")
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
