"""`python -m gpudoctor` and the console script."""

from __future__ import annotations

import sys

_LIVE = ("topo", "checkup", "bench-pcie", "capture")  # commands that look at this machine
_NOT_LIVE = ("--from", "--help", "-h", "--timeout")  # options that ask for something else, or another deadline


def main() -> None:
    """Answer --version before anything heavy is imported; hand everything else to the command line.

    NVML takes longer to start than this program: a command that will need it asks first of all. So does CUDA.
    """
    if sys.argv[1:] == ["--version"]:
        from gpudoctor import __version__

        print(f"gpudoctor {__version__}")
        return
    words = sys.argv[1:]
    if (not words or words[0] in _LIVE) and not any(word.startswith(_NOT_LIVE) for word in words):
        from gpudoctor.collect import nvml_start

        nvml_start.begin(10.0)
        if words[:1] == ["bench-pcie"]:
            from gpudoctor.measure import early

            early.begin(words)
    from gpudoctor.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
