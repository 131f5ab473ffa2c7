"""Captures of a few steps, made by hand: as torch's profiler exports them, and as the tools of Nsight do.

Columns and their order are those of the tools' documentation (SQLite schema reference, nvtx_gpu_proj_sum, raw page).
"""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path
from typing import Any

from lab.probes.profiles.ncu import DRAM, DURATION, WARPS
from lab.probes.proofs.gpu_trace import WINDOW

N_STEPS = 3


def events(*extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of 1000 us on the host: a draft and a verify pass of two layers, the GPU a step behind."""
    made: list[dict[str, Any]] = []

    def add(cat: str, name: str, ts: float, dur: float, number: int | None = None) -> None:
        args = {} if number is None else {"correlation": number}
        made.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args})

    for i in range(N_STEPS):
        at = 1000.0 * i
        add("user_annotation", WINDOW, at, 900)
        add("user_annotation", "EagleModule::forward", at + 10, 100)
        add("user_annotation", "draft.fc", at + 20, 50)
        add("user_annotation", "BASE_DECODE_STEP", at + 200, 400)
        add("user_annotation", "not the engine's", at + 200, 400)
        for layer, start in ((0, 210), (1, 310)):
            add("user_annotation", f"target.{layer}.attn", at + start, 60)
            add("cuda_runtime", "cudaGraphLaunch", at + start + 5, 3, 10 * i + layer)
            # Two kernels of one launch, of which the second begins before the first has ended.
            add("kernel", "gemm", at + 1000 + start, 40, 10 * i + layer)
            add("kernel", "attend", at + 1030 + start, 30, 10 * i + layer)
        add("cuda_runtime", "cudaGraphLaunch", at + 25, 3, 10 * i + 5)
        add("kernel", "gemm", at + 1025, 20, 10 * i + 5)
        add("cuda_runtime", "cudaEventSynchronize", at + 800, 10)
    return [*made, *extra]


def write_sqlite(path: Path, *, without: str = "") -> Path:
    """The events above as `nsys export --type sqlite` lays them out."""
    base = sqlite3.connect(path)
    base.executescript("""
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, category INTEGER,
            color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, demangledName INTEGER, shortName INTEGER, graphNodeId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, bytes INTEGER, copyKind INTEGER,
            srcKind INTEGER, dstKind INTEGER, correlationId INTEGER);
    """)
    ids: dict[str, int] = {}

    def named(name: str) -> int:
        if name not in ids:
            ids[name] = len(ids) + 1
            base.execute("INSERT INTO StringIds VALUES (?, ?)", (ids[name], name))
        return ids[name]

    for number, event in enumerate(events()):
        name, start = event["name"], int(1e3 * event["ts"])
        end, correlation = start + int(1e3 * event["dur"]), event["args"].get("correlation")
        if event["cat"] == "user_annotation":  # names stand in the event or in the table of strings
            text, text_id = (name, None) if number % 2 else (None, named(name))
            row = (start, end, 59, None, None, None, text, 7, None, text_id, 1)
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)
        elif event["cat"] == "cuda_runtime":
            row = (
                start,
                end,
                0,
                7,
                1000 + number if correlation is None else correlation,
                named(f"{name}_v10000"),
                0,
                None,
            )
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?,?)", row)
        else:
            row = (start, end, 0, 7, correlation, named(f"{name}(long)"), named(name), number)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?)", row)
    base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1331000, 1333000, 4, 2, 2, 0, 77)")
    base.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, 0, 0, 0, 'a mark', 7, NULL, NULL, 0)")
    if without:
        base.execute(f"DROP TABLE {without}")
    base.commit()
    base.close()
    return path


COLUMNS = (
    "Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns),Proj Min (ns),"
    "Proj Max (ns),Proj StdDev (ns),Total GPU Ops,Avg GPU Ops,Avg Range Lvl,Avg Num Child"
)
PROJECTED = f"""\
Processing [nsys.sqlite] with [nvtx_gpu_proj_sum.py]...
{COLUMNS}
eagle3core:{WINDOW},PushPop,900000,1800000,2,450000.0,450000.0,450000,450000,0.0,10,5.0,0.0,2.0
eagle3core:BASE_DECODE_STEP,PushPop,600000,700000,2,300000.0,300000.0,300000,300000,0.0,8,4.0,1.0,2.0
eagle3core:target.0.attn,PushPop,240000,130000,2,120000.0,120000.0,120000,120000,0.0,4,2.0,2.0,0.0
eagle3core:target.1.attn,PushPop,260000,130000,2,130000.0,130000.0,130000,130000,0.0,4,2.0,2.0,0.0
eagle3core:EagleModule::forward,PushPop,100000,90000,2,50000.0,50000.0,50000,50000,0.0,2,1.0,1.0,1.0
"""


NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def write_raw_page(path: Path, *, unit: str = "Mbyte") -> Path:
    """Three kernels as `ncu --page raw --csv` prints them: names, units, values with separators of thousands."""
    ranges = '7 "eagle3core:eagle3lab step:none","eagle3core:BASE_DECODE_STEP:none","eagle3core:target.{}.attn:none"'
    draft = '7 "eagle3core:eagle3lab step:none","eagle3core:EagleModule::forward:none","eagle3core:draft.fc:none"'
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write("==PROF== Connected to process 4242\n")
        write = csv.writer(stream, quoting=csv.QUOTE_ALL)
        write.writerow(["ID", "Process ID", "Kernel Name", "Block Size", "Grid Size", NVTX, DRAM, DURATION, WARPS])
        write.writerow(["", "", "", "block", "grid", "", unit, "ns", "%"])
        write.writerow(["0", "7", "gemm", "(256, 1, 1)", "(8, 1, 1)", ranges.format(0), "400", "100,000", "50.0"])
        write.writerow(["1", "7", "attend", "(256, 1, 1)", "(8, 1, 1)", ranges.format(31), "100", "300,000", "10.0"])
        write.writerow(["2", "7", "gemm", "(256, 1, 1)", "(8, 1, 1)", draft, "40", "10,000", "80.0"])
    return path
