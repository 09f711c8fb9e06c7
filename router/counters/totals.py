"""What this router has been asked for and what came of it, as the planner wants to know it: counters that only rise.

Counted by the choices of requests, told once a second by `reports.py`.
"""

from baton_proto.router_report import BUCKETS, RouterTotals, bucket_of


class Totals:
    def __init__(self) -> None:
        self._arrivals = 0
        self._input_tokens = 0
        self._input_tokens_squared = 0.0
        self._started = 0
        self._started_tokens = 0
        self._cached_tokens = 0
        self._local_prefills = 0
        self._finished = 0
        self._output_tokens = 0
        self._ttft = [0] * BUCKETS
        self._itl = [0] * BUCKETS

    def arrived(self, prompt_tokens: int) -> None:
        self._arrivals += 1
        self._input_tokens += prompt_tokens
        self._input_tokens_squared += float(prompt_tokens) ** 2

    def started(self, prompt_tokens: int, cached_tokens: int, local_prefill: bool) -> None:
        """Its first token has come. `local_prefill`: the decode worker ran the prompt, though it had not to."""
        self._started += 1
        self._started_tokens += prompt_tokens
        self._cached_tokens += cached_tokens
        self._local_prefills += local_prefill

    def first_token(self, ttft_s: float) -> None:
        self._ttft[bucket_of(ttft_s * 1e3)] += 1

    def ended(self, output_tokens: int, decode_s: float) -> None:
        """`decode_s`: from the first token to the last. An answer without a token counts nowhere."""
        if not output_tokens:
            return
        self._finished += 1
        self._output_tokens += output_tokens
        if output_tokens > 1:
            self._itl[bucket_of(decode_s * 1e3 / (output_tokens - 1))] += 1

    def snapshot(self) -> RouterTotals:
        return RouterTotals(
            self._arrivals,
            self._input_tokens,
            self._input_tokens_squared,
            self._started,
            self._started_tokens,
            self._cached_tokens,
            self._local_prefills,
            self._finished,
            self._output_tokens,
            list(self._ttft),
            list(self._itl),
        )
