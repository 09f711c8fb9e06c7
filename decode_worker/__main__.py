"""`python -m decode_worker --config FILE --worker-id ID`: one decode worker."""

from decode_worker.decode_worker import DecodeWorker
from worker.lives import main

if __name__ == "__main__":
    main(DecodeWorker)
