"""Probes that load the machine. Every one runs in a child process; they run only our own code."""

from gpudoctor.measure.copies import BenchResult, bench_copies

__all__ = ["BenchResult", "bench_copies"]
