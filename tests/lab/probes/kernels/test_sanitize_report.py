"""Only a tool's own summary of nothing, under a program that ended well with right numbers, is called clean."""

from __future__ import annotations

import pytest

from lab.probes.sanitizer.report import CLEAN, CLEAN_IN_FORM, FAILED, FOUND, INCOMPLETE, Summary, judged, summary_of

pytestmark = pytest.mark.reference

CLEAN_MEMCHECK = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACECHECK = (
    "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
INVALID_WRITE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at out_of_bounds_kernel()+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x87654320 is out of bounds
=========     and is 124,310,666,263,776 bytes before the nearest allocation at 0x710fdc800000 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: main [0xae66] in memcheck_demo
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in block_error.cu:41
=========     and Read access at sumKernel(int *, int *)+0x100 in block_error.cu:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARP_RACE = RACE.replace("Error:", "Warning:").replace("(1 error, 0 warnings)", "(0 errors, 1 warning)")
MANY = """\
========= ERROR SUMMARY: 1025 errors
========= ERROR SUMMARY: 925 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
NEVER_STARTED = """\
========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= Error: couldn't find exit code.
"""
NO_DEVICE = "========= COMPUTE-SANITIZER\n========= Error: Device not supported.\n========= ERROR SUMMARY: 0 errors\n"
RAN = {"card": "gemm", "cases": 2, "launches": 5, "in_form": 0, "faults": [], "seconds": 1.0}


@pytest.mark.parametrize(
    ("tool", "text", "counted"),
    [
        ("memcheck", CLEAN_MEMCHECK, Summary(0)),
        ("memcheck", INVALID_WRITE, Summary(1)),
        ("memcheck", MANY, Summary(1025)),
        ("memcheck", CLEAN_RACECHECK, None),
        ("racecheck", CLEAN_RACECHECK, Summary(0, 0, 0)),
        ("racecheck", RACE, Summary(1, 1, 0)),
        ("racecheck", WARP_RACE, Summary(0, 1, 1)),
        ("racecheck", CLEAN_MEMCHECK, None),
        ("racecheck", CLEAN_RACECHECK + CLEAN_RACECHECK.replace("0 hazards", "3 hazards"), Summary(0, 3, 0)),
        ("memcheck", NEVER_STARTED, None),
        ("racecheck", "", None),
    ],
)
def test_a_summary_is_read_in_the_tools_own_words(tool: str, text: str, counted: Summary | None) -> None:
    assert summary_of(text, tool) == counted


@pytest.mark.parametrize(
    ("tool", "text", "code", "result", "verdict", "words"),
    [
        ("memcheck", CLEAN_MEMCHECK, 0, RAN, CLEAN, ""),
        ("racecheck", CLEAN_RACECHECK, 0, RAN, CLEAN, ""),
        ("memcheck", INVALID_WRITE, 86, RAN, FOUND, "Invalid __global__ write of size 4 bytes"),
        ("memcheck", INVALID_WRITE, 86, None, FOUND, "out_of_bounds_kernel()"),
        (
            "racecheck",
            CLEAN_RACECHECK,
            0,
            {**RAN, "in_form": 3},
            CLEAN_IN_FORM,
            "3 of the kernels are not as the engine runs",
        ),
        ("racecheck", RACE, 86, {**RAN, "in_form": 3}, FOUND, "Write access at sumKernel"),
        ("racecheck", RACE, 86, RAN, FOUND, "Write access at sumKernel"),
        ("racecheck", WARP_RACE, 0, RAN, FOUND, "Warning: Race reported"),
        ("memcheck", "", 0, RAN, FAILED, "no verdict"),
        ("memcheck", NEVER_STARTED, 255, None, FAILED, "before first instrumented API call"),
        ("memcheck", NO_DEVICE, 0, RAN, FAILED, "Device not supported"),
        ("memcheck", CLEAN_MEMCHECK, 1, None, FAILED, "did not reach its end"),
        ("memcheck", CLEAN_MEMCHECK, 1, RAN, FAILED, "exit code 1"),
        ("memcheck", CLEAN_MEMCHECK, 0, {**RAN, "launches": 0}, FAILED, "after 0 kernels"),
        ("memcheck", CLEAN_MEMCHECK, 0, {**RAN, "faults": ["y: error 1"]}, FAILED, "y: error 1"),
        ("racecheck", CLEAN_RACECHECK, None, RAN, INCOMPLETE, "stopped after 7 s"),
    ],
)
def test_a_verdict_needs_a_summary_an_end_and_right_numbers(
    tool: str, text: str, code: int | None, result: dict | None, verdict: str, words: str
) -> None:
    outcome = judged("gemm", tool, text, code, result, 7.0)
    assert outcome.verdict == verdict
    assert bool(outcome.reasons) == (verdict != CLEAN)
    assert words in "\n".join(outcome.reasons)
    assert words in outcome.line()


def test_an_outcomes_row_tells_what_was_counted_from_what_was_not() -> None:
    values = judged("gemm", "racecheck", WARP_RACE, 0, RAN, 7.04).values()
    assert (values["verdict"], values["n_launches"], values["took_s"]) == (FOUND, 5, 7.0)
    assert (values["n_errors"], values["n_hazards"], values["n_warnings"]) == (0, 1, 1)
    assert judged("gemm", "racecheck", "", 0, RAN, 7.0).values()["n_hazards"] is None


def test_frames_of_the_host_are_not_among_the_reasons() -> None:
    assert "Host Frame" not in judged("gemm", "memcheck", INVALID_WRITE, 86, RAN, 1.0).line()
