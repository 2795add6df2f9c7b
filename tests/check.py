"""The one check command: ruff, mypy --strict, import-linter and pytest; runs all of them, fails if any fails.

usage: python tests/check.py [pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def main() -> int:
    steps = {
        "ruff check": [sys.executable, "-m", "ruff", "check", "."],
        "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
        "mypy --strict": [sys.executable, "-m", "mypy"],
        "import-linter": [str(BIN / "lint-imports")],
        "pytest": [sys.executable, "-m", "pytest", "-n", "2", *sys.argv[1:]],
    }
    failed = []
    for name, command in steps.items():
        print(f"== {name}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} if name == "import-linter" else None
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    print(f"check: {'failed: ' + ', '.join(failed) if failed else 'all passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
