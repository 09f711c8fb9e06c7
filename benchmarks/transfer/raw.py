"""The copy alone: into memory of another process, which is mapped here."""

import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.transfer.case import Case, gpu_median_s, median_s
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.device.memory_range import PeerRange

RUN_KIB = (8, 16, 32, 64, 256)
LONG_RUN_KIB = (256, 512, 1024, 4096)  # copy engines are measured with these as well
RAW_MIB = (4, 64, 512)


def _raw_bytes(case: Case) -> int:
    return (RAW_MIB[-1] << 20) * 2 if case.device == "cuda" else 64 << 20


def decode(case: Case, pipe: Connection, answers: Any) -> None:
    driver = case.start()
    layout = SlabLayout(1, _raw_bytes(case) >> 16, 8, 16, 128, "bfloat16")  # blocks of 64 KiB
    slab = Slab(layout, driver)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(case.socket_path)
        listener.listen()
        pipe.send("listening")
        sock, _ = listener.accept()
        socket.send_fds(sock, [b"x"], [slab.export()])
        sock.recv(1)  # waits until the prefill side has ended


def prefill(case: Case, pipe: Connection, answers: Any) -> None:
    driver = case.start()
    assert pipe.recv() == "listening"
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(case.socket_path)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    peer = PeerRange(driver, fds[0], _raw_bytes(case), "the decode side")
    ours = Slab(SlabLayout(1, _raw_bytes(case) >> 16, 8, 16, 128, "bfloat16"), driver)
    if case.device == "cuda":
        for row in _raw_cuda(case, ours, peer):
            answers.put(row)
    else:
        source, destination = np.frombuffer(ours.buffer, dtype=np.uint8), np.asarray(peer.array)

        def copy() -> None:
            destination[:] = source

        seconds = median_s(copy, case.rounds)
        answers.put({"way": "numpy", "MiB": len(source) >> 20, "run KiB": "all", "GB/s": len(source) / seconds / 1e9})
    answers.put(None)


def _raw_cuda(case: Case, ours: Slab, peer: PeerRange) -> Any:
    import torch

    from kvtransfer.transports.copy_blocks import copy_blocks

    source = ours.tensor.flatten().view(torch.int64)
    destination = torch.as_tensor(peer.array, device=source.device).view(torch.int64)
    for mib in RAW_MIB:
        for kib in RUN_KIB:
            words, count = kib << 7, (mib << 20) // (kib << 10)
            rows = (source.view(-1, words), destination.view(-1, words))
            if kib < 64:  # a range of heads of each block of 64 KiB
                count = min(count, len(source) // (64 << 7))
                rows = (source.view(-1, 64 << 7)[:, :words], destination.view(-1, 64 << 7)[:, words : 2 * words])
            places = torch.stack([torch.randperm(len(rows[0]))[:count] for _ in range(2)]).to(torch.int32)
            table = places.to(source.device)
            nbytes = count * kib << 10

            def copy(layers: Any = (rows[0][None], rows[1][None]), table: Any = table) -> None:
                copy_blocks(*layers, table)

            alone_s, host_s = gpu_median_s(copy, case.rounds)
            row = {"way": "kernel", "MiB": nbytes >> 20, "run KiB": kib, "GB/s": nbytes / alone_s / 1e9}
            yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}
            if kib == RUN_KIB[-1] and mib < RAW_MIB[-1]:
                yield from _engine_rows(case, source, destination, mib)
            if kib == 64:
                batch = _batch_copy(rows, places.tolist(), kib << 10)
                alone_s, host_s = gpu_median_s(batch, min(case.rounds, 5))
                row |= {"way": "cuMemcpyBatchAsync", "GB/s": nbytes / alone_s / 1e9}
                yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}
    torch.cuda.synchronize()


def _engine_rows(case: Case, source: Any, destination: Any, mib: int) -> Any:
    import torch
    from cuda.bindings import driver as cuda

    stream = torch.cuda.current_stream().cuda_stream
    for kib in LONG_RUN_KIB:
        nbytes = kib << 10
        count = (mib << 20) // nbytes
        places = torch.stack([torch.randperm(source.nbytes // nbytes)[:count] for _ in range(2)]).T.tolist()

        def copy(nbytes: int = nbytes, places: Any = places) -> None:
            for ours, theirs in places:
                to, begin = destination.data_ptr() + theirs * nbytes, source.data_ptr() + ours * nbytes
                cuda.cuMemcpyDtoDAsync(to, begin, nbytes, stream)

        alone_s, host_s = gpu_median_s(copy, case.rounds)
        row = {"way": "copy engine", "MiB": mib, "run KiB": kib, "GB/s": (mib << 20) / alone_s / 1e9}
        yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}


def _batch_copy(rows: Any, places: list[list[int]], nbytes: int) -> Callable[[], None]:
    import torch
    from cuda.bindings import driver as cuda

    source, destination = (row.data_ptr() for row in rows)
    sources = [cuda.CUdeviceptr(source + block * nbytes) for block in places[0]]
    destinations = [cuda.CUdeviceptr(destination + block * nbytes) for block in places[1]]
    count = len(sources)
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # it refuses the null stream

    def copy() -> None:
        start = torch.cuda.current_stream()
        stream.wait_stream(start)
        answer = cuda.cuMemcpyBatchAsync(
            destinations, sources, [nbytes] * count, count, [attributes], [0], 1, stream.cuda_stream
        )
        if answer[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemcpyBatchAsync: {answer}")
        start.wait_stream(stream)

    return copy
