"""Probes that load the machine. Every one runs in a child process; they run only our own code."""

from gpudoctor.measure.bench import METRICS, BenchResult, Level, bench_copies

__all__ = ["METRICS", "BenchResult", "Level", "bench_copies"]
