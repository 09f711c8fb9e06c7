"""`python -m prefill_worker --config FILE --worker-id ID`: one prefill worker."""

from prefill_worker.prefill_worker import PrefillWorker
from runtime.config.serving import for_prefill_worker
from worker.lives import main

if __name__ == "__main__":
    main(PrefillWorker, for_prefill_worker)
