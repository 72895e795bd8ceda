"""Settings that all tests share."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

SAFE_ISA = "AVX512_CORE_BF16"


def announces_amx() -> bool:
    """Whether the processor says that it multiplies tiles of bfloat16."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "amx_bf16" in flags.read_text()


def survives_bfloat16() -> bool:
    """Whether a product in bfloat16 leaves Python alive: some hypervisors forbid what the processor announces."""
    code = "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


# before torch's first product; workers of pytest-xdist inherit what is found out here
if "PYTEST_XDIST_WORKER" not in os.environ and announces_amx() and not survives_bfloat16():
    os.environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA
    sys.stderr.write(f"this machine announces AMX but forbids it: testing with ONEDNN_MAX_CPU_ISA={SAFE_ISA}\n")

import pytest
import torch
from hypothesis import settings

# one thread per worker: the tests' tensors are small, and pytest-xdist fills the cores already
torch.set_num_threads(1)

# a suite started in the background of a shell ignores Ctrl-C, and so would the commands whose answer to it is tested
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# the same examples on every machine; timing says nothing on a busy one
settings.register_profile("hesscale", deadline=None, derandomize=True, max_examples=15)
settings.load_profile("hesscale")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spares the collector what all tests share: many of them collect, and thousands of cases are a large heap."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many operations of torch's database were really checked."""
    counts = {
        outcome: sum(
            "test_op_database.py::test_operation" in report.nodeid for report in terminalreporter.getreports(outcome)
        )
        for outcome in ("passed", "skipped")
    }
    if any(counts.values()):
        line = f"torch's database of operations: {counts['passed']} checked, {counts['skipped']} skipped (-rs says why)"
        terminalreporter.write_line(line)
