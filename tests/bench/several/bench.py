"""What the steps of bench_several_gpus share: the state of one run, and how a step says that it has nothing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from several import boxed, nccl_tests

HERE = Path(__file__).resolve().parent


class Skip(Exception):  # no error: a step that has nothing to do here
    """Why a step was not run."""


class Failed(Exception):
    """Why a step gave nothing."""


@dataclass
class Bench:
    options: argparse.Namespace
    gpus: int
    deadline: float
    raw: Path
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    building: nccl_tests.Build | None = None
    preparing: subprocess.Popen[bytes] | None = None  # of the images
    case: Any = None  # the redacted Case of `capture`
    sweep: list[dict[str, Any]] = field(default_factory=list)  # torch's all-reduce by size
    copies: list[dict[str, Any]] = field(default_factory=list)  # what bench-pcie measured
    tuned: Path | None = None  # the patched script
    tuned_env: dict[str, str] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(
        self, name: str, words: Sequence[str], limit_s: float, *, env: dict[str, str] | None = None,
        cwd: Path | None = None, suffix: str = ".txt",
    ) -> boxed.Ran:  # fmt: skip
        """A child of a step; never longer than what is left, with a rest for the files."""
        limit = min(limit_s, self.left_s() - boxed.TERM_WAIT_S - 2)
        if limit < 1:
            raise Skip("no time was left")
        return boxed.run(
            words, limit_s=limit, out=self.raw / f"{name}{suffix}", cwd=cwd, env={**cpu_threads(), **(env or {})}
        )

    def gpudoctor(
        self, name: str, *words: str, limit_s: float, cwd: Path | None = None
    ) -> tuple[dict[str, Any], boxed.Ran]:
        """One command's envelope. Findings are no failure; a usage or tool failure is."""
        ran = self.run(name, [sys.executable, "-m", "gpudoctor", *words], limit_s, cwd=cwd, suffix=".json")
        try:
            envelope: dict[str, Any] = json.loads(ran.out.read_text())
        except ValueError:
            raise Failed(ran.why()) from None
        if "case" not in envelope and "cases" not in envelope:
            raise Failed("; ".join(envelope.get("errors", ())) or ran.why())
        return envelope, ran

    def script(self) -> list[str]:
        """Arguments of the training script that every run of it gets."""
        return ["--data", self.options.data, *self.options.script.split()]

    def ranks(self, count: int, script: Path, *words: str) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        return [sys.executable, *launcher, str(script), *words]


def cpu_threads() -> dict[str, str]:
    """The same number of CPU threads a rank whatever the count: torchrun would give a lone rank all of them."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}


def said_by(envelope: dict[str, Any]) -> dict[str, Any]:
    """The parts of an envelope that are looked at; the whole one lies in raw."""
    return {
        "exit_code": envelope["exit_code"],
        "findings": [
            {key: found[key] for key in ("rule", "severity", "subject", "message", "evidence")}
            for found in envelope["findings"]
        ],
        "not_checked": envelope["not_checked"],
        "errors": envelope["errors"],
        "notes": envelope.get("notes", []),
    }
