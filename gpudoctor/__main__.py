"""`python -m gpudoctor` and the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Answer --version before anything heavy is imported; hand everything else to the command line."""
    if sys.argv[1:] == ["--version"]:
        from gpudoctor import __version__

        print(f"gpudoctor {__version__}")
        return
    from gpudoctor.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
