"""Records launches as CUDA graphs, one after the other, on a stream and in a memory pool of their own."""

from collections.abc import Callable
from types import TracebackType

import torch


class GraphRecorder:
    """Records graphs that share one memory pool. Invariant: graphs run one after the other."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> "GraphRecorder":
        self._stream.wait_stream(torch.cuda.current_stream())
        self._context.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records `work` and returns the function that replays it in stream order. Invariant: `work` has run before,
        because a capture must not compile or load kernels."""
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay
