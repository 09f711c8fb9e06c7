"""`python -m tests.vllm.contract_run CONFIG`, under an interpreter that has vLLM: one engine keeps the whole contract.

One engine for all clauses, because it takes a minute to start. Prints a line for each clause, with what went wrong.
"""

import asyncio
import json
import sys
import traceback
from pathlib import Path

from runtime.config.serving import load_config
from tests.engine.contract import CONTRACT, Subject
from worker.engines.table import build_worker_engine


async def main() -> None:
    subject = Subject(build_worker_engine(load_config(Path(sys.argv[1]))))
    for clause in CONTRACT:
        problem = ""
        try:
            await clause(subject)
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"clause": clause.__name__, "problem": problem}), flush=True)
    subject.assembly.close()


if __name__ == "__main__":
    asyncio.run(main())
