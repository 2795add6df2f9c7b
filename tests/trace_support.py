"""Traces for the tests: recorded excerpts, invented events, an export of Nsight Systems after its documented schema."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from gpudoctor.model import TraceFacts
from gpudoctor.read.traces import read_traces

FOLDER = Path(__file__).parent / "artifacts" / "traces"
DLRM = [FOLDER / f"dlrm_rank{rank}.json.gz" for rank in range(8)]


def recorded(name: str) -> TraceFacts:
    """The facts of one recorded excerpt."""
    return facts(FOLDER / f"{name}.json.gz")


def facts(path: Path) -> TraceFacts:
    result = read_traces([path])
    assert result.errors == ()
    return result.jobs[0][0]


def events(*, steps: int = 4, base: float = 1_700_000_000_000_000.0, scale: float = 1.0) -> list[dict[str, Any]]:
    """Steps of 10 ms: 2 ms for the loader, a pageable copy of 1 ms, 4 ms of kernels, 1 ms of communication (half of it
    beside a kernel), item() at the end."""
    found: list[dict[str, Any]] = []

    def add(cat: str, name: str, begin: float, length: float, tid: object = 7, **arguments: object) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid}
        found.append(
            {**event, "ts": base + begin * 1000 * scale, "dur": length * 1000 * scale, "args": dict(arguments)}
        )

    for step in range(steps):
        at, number = 10.0 * step, 100 * step
        add("user_annotation", f"ProfilerStep#{step}", at, 10)
        add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 2)
        add("cpu_op", "aten::to", at + 2, 1.2)
        add("cpu_op", "aten::copy_", at + 2.05, 1.1)
        add("cuda_runtime", "cudaMemcpyAsync", at + 2.1, 1.0, correlation=number + 1)
        add(
            "gpu_memcpy",
            "Memcpy HtoD (Pageable -> Device)",
            at + 2.1,
            1,
            0,
            stream=7,
            correlation=number + 1,
            device=0,
            bytes=10_000_000,
        )
        for kernel in range(4):
            add("cuda_runtime", "cudaLaunchKernel", at + 3.2 + kernel / 10, 0.05, correlation=number + 2 + kernel)
            add(
                "kernel",
                f"gemm_{kernel}<float>",
                at + 4 + kernel,
                1,
                0,
                stream=7,
                device=0,
                correlation=number + 2 + kernel,
            )
        add("cuda_runtime", "cudaLaunchKernel", at + 3.7, 0.05, correlation=number + 9)
        add("kernel", "ncclDevKernel_AllReduce_Sum_f32", at + 7.5, 1, 0, stream=20, device=0, correlation=number + 9)
        add("cpu_op", "aten::item", at + 4, 5)
        add("cpu_op", "aten::_local_scalar_dense", at + 4.1, 4.8)
        add("cuda_runtime", "cudaStreamSynchronize", at + 4.2, 4.5, correlation=number + 10)
        found.append({"ph": "s", "id": number, "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 7, "ts": base})
    return found


def document(found: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A trace as torch.profiler writes it."""
    about = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    return {**about, **more, "traceEvents": found}


def write(path: Path, found: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps(document(found, **more)))
    return path


def nsys_export(path: Path, *, schema: str = "new", processes: int = 1, steps: int = 4) -> Path:
    """A small export after "SQLite Export Schema Reference"; "old" has no process ids, ENUM tables, long names."""
    new = schema == "new"
    connection = sqlite3.connect(path)
    owner = ", globalPid INT" if new else ""
    name = "demangledName" if new else "shortName"
    connection.executescript(
        f"""
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT, contextId INT,
            streamId INT, correlationId INT, {name} INT{owner});
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT NOT NULL, end INT NOT NULL, deviceId INT, contextId INT,
            streamId INT, correlationId INT, bytes INT, copyKind INT, srcKind INT, dstKind INT{owner});
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT NOT NULL, end INT NOT NULL, globalTid INT,
            correlationId INT, nameId INT, returnValue INT);
        CREATE TABLE NVTX_EVENTS (start INT NOT NULL, end INT, eventType INT, globalTid INT, text TEXT, textId INT);
        CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, busLocation TEXT);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200', '0000:3b:00.0');
        INSERT INTO StringIds VALUES (1, 'gemm<float>(int)'), (2, 'cudaLaunchKernel_v7000'),
            (3, 'cudaMemcpyAsync_v3020'), (4, 'cudaStreamSynchronize_v3020'), (5, 'dataloader next'),
            (6, 'ncclDevKernel_AllReduce_Sum_f32');
        """
    )
    if new:
        connection.executescript(
            """
            CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER PRIMARY KEY, name TEXT, label TEXT);
            INSERT INTO ENUM_CUDA_MEMCPY_OPER VALUES (1, 'CUDA_MEMCPY_KIND_HTOD', 'Host-to-Device');
            CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER PRIMARY KEY, name TEXT, label TEXT);
            INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'CUDA_MEMOPR_MEMORY_KIND_PAGEABLE', 'Pageable'),
                (2, 'CUDA_MEMOPR_MEMORY_KIND_DEVICE', 'Device');
            """
        )
    kinds = (0, 2) if new else (1, 3)
    for process in range(processes):
        pid = 4000 + process
        thread = (pid << 24) | 77
        own = (pid << 24,) if new else ()
        for step in range(steps):
            at, number = step * 10_000_000, step * 100

            def insert(table: str, *row: object) -> None:
                connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

            insert("NVTX_EVENTS", at, at + 10_000_000, 59, thread, f"step {step}", None)
            insert("NVTX_EVENTS", at, at + 2_000_000, 59, thread, None, 5)
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", at + 2_100_000, at + 3_100_000, thread, number + 1, 3, 0)
            insert(
                "CUPTI_ACTIVITY_KIND_MEMCPY",
                at + 2_100_000,
                at + 3_100_000,
                process,
                1,
                7,
                number + 1,
                10_000_000,
                1,
                *kinds,
                *own,
            )
            for kernel in range(4):
                begin = at + (4 + kernel) * 1_000_000
                insert(
                    "CUPTI_ACTIVITY_KIND_RUNTIME",
                    at + 3_200_000 + kernel * 100_000,
                    at + 3_250_000 + kernel * 100_000,
                    thread,
                    number + 2 + kernel,
                    2,
                    0,
                )
                insert(
                    "CUPTI_ACTIVITY_KIND_KERNEL", begin, begin + 1_000_000, process, 1, 7, number + 2 + kernel, 1, *own
                )
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", at + 4_200_000, at + 8_700_000, thread, number + 10, 4, 0)
    connection.commit()
    connection.close()
    return path
