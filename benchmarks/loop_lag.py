"""How long hostile requests of 8 MB, and short ones that ask for a thousand answers, hold the router's event loop, in
times of an ordinary request.

    python -m benchmarks.loop_lag [--rounds 5] [--json FILE]

The requests are those of tests/router/hostile_requests.py and fanned_out_requests.py. What counts is the longest time
in which the loop did not come around while a request was answered, in the best round. Ends with 1 when a ratio is above
the goal.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, write_result
from runtime.config.surroundings import LoggingConfig
from runtime.telemetry.logging import configure_logging
from tests.router.loop_lag import ORDINARY, fan_out_lags_s, lags_s
from tests.router.test_loop_lag import MAX_RATIO
from tests.tiny_model import write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configure_logging(LoggingConfig(level="error"), "router-1")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "tiny")
        lag = uvloop.run(fan_out_lags_s(model, options.rounds)) | uvloop.run(lags_s(model, options.rounds))
    ordinary_s = lag.pop(ORDINARY)
    rows = [{"request": name, "lag_ms": 1000 * held_s, "ratio": held_s / ordinary_s} for name, held_s in lag.items()]
    table = Table(title=f"an ordinary request: {1000 * ordinary_s:.1f} ms; goal: a ratio of {MAX_RATIO:g} at most")
    for column in ("request, answer", "lag ms", "ratio"):
        table.add_column(column, justify="left" if column.startswith("request") else "right")
    for row in rows:
        table.add_row(row["request"], f"{row['lag_ms']:.1f}", f"{row['ratio']:.1f}")
    Console().print(table)
    if options.json is not None:
        head = {"benchmark": "loop_lag", **describe(), "rounds": options.rounds, "goal": MAX_RATIO}
        write_result(options.json, {**head, "ordinary_ms": 1000 * ordinary_s, "rows": rows})
    sys.exit(max(row["ratio"] for row in rows) > MAX_RATIO)


if __name__ == "__main__":
    main()
