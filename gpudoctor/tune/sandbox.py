"""Keeps a user's files safe during trials: a private mount namespace with an overlay over the working directory.

Writes below the directory land in memory and vanish with the trial; reads see the real files. Where the system
does not allow this (no unshare, no right to mount), trials fall back on the write guard of observe.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# $1 directory to protect, $2 empty directory for the overlay's own files, $3 directory whose writes must stay visible
# outside (the watch records). The record directory is held by a bind mount before the overlay may cover it.
_SCRIPT = """set -e
root=$1 own=$2 keep=$3
shift 3
mount -t tmpfs gpudoctor "$own"
mkdir "$own/upper" "$own/work" "$own/keep"
mount --bind "$keep" "$own/keep"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$own/upper,workdir=$own/work" "$root"
mkdir -p "$keep"
mount --bind "$own/keep" "$keep"
cd "$root"
"""
_RUN = """exec "$@"
"""
# After the command: a checksum for each file that it left in the overlay, and the names of those that it removed.
# Compiled modules are Python's own.
_RUN_AND_LIST = """set +e
"$@"
code=$?
cd "$own/upper" || exit $code
{ find . -name __pycache__ -prune -o -type f -exec sha256sum -z {} + &&
  find . -type c -printf 'removed  %p\\0'; } >"$own/keep/written.part" &&
  mv "$own/keep/written.part" "$own/keep/written"
exit $code
"""
WRITTEN = "written"
_PROBE_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How to wrap a command so that what it writes below `root` is discarded; `wrap` is empty when unavailable."""

    root: Path
    own: Path | None
    reason: str | None  # why there is no overlay, None when there is one
    user_namespace: bool = False

    def wrap(self, command: Sequence[str], keep: Path, *, list_written: bool = False) -> list[str]:
        """The command inside the namespace; unchanged when there is no overlay. `keep` stays writable outside.

        list_written: when the command has ended by itself, keep/written tells what it wrote (see read_written).
        """
        if self.own is None:
            return list(command)
        flags = ["--user", "--map-root-user"] if self.user_namespace else []
        head = ["unshare", *flags, "--mount", "--propagation", "private", "sh"]
        script = _SCRIPT + (_RUN_AND_LIST if list_written else _RUN)
        return [*head, "-c", script, "gpudoctor-sandbox", str(self.root), str(self.own), str(keep), *command]

    def close(self) -> None:
        """Remove the (empty) mount point."""
        if self.own is not None:
            shutil.rmtree(self.own, ignore_errors=True)


def open_sandbox(root: Path) -> Sandbox:
    """Find out, by trying `true` inside it, whether an overlay over `root` (absolute) is possible here."""
    reason = _obstacle(root)
    if reason is not None:
        return Sandbox(root, None, reason)
    own = Path(tempfile.mkdtemp(prefix="gpudoctor-overlay-"))
    for user_namespace in (False, True):
        sandbox = Sandbox(root, own, None, user_namespace)
        with tempfile.TemporaryDirectory(prefix="gpudoctor-keep-") as keep:
            outcome = _try(sandbox, Path(keep))
        if outcome is None:
            return sandbox
        reason = outcome
    own.rmdir()
    return Sandbox(root, None, reason)


def read_written(keep: Path) -> dict[str, str] | None:
    """Checksum (SHA-256) by path relative to the root of each file that the command left, "removed" for those that it
    took away; None when it was not told."""
    try:
        raw = (keep / WRITTEN).read_bytes()
    except OSError:
        return None
    found = {}
    for entry in raw.decode("utf-8", "surrogateescape").split("\0"):
        checksum, separator, name = entry.partition("  ")
        if separator:
            found[name.removeprefix("./")] = checksum
    return found


def checksums(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The same for files that were written without an overlay; a file that is not there any more is "removed"."""
    found = {}
    for name in names:
        try:
            with (root / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except IsADirectoryError:
            continue
        except OSError:
            found[name] = "removed"
    return found


def _obstacle(root: Path) -> str | None:
    if shutil.which("unshare") is None:
        return "the program unshare is not installed"
    if root == Path(root.anchor):
        return "the working directory is the root of the file system"
    if any(mark in str(root) for mark in ",:\\"):
        return "the working directory's name holds a character that mount options cannot carry"
    try:
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return "the list of mounts cannot be read"
    if any(Path(mount.replace("\\040", " ")).is_relative_to(root) and mount != str(root) for mount in mounts):
        return "another file system is mounted below the working directory and an overlay would hide it"
    return None


def _try(sandbox: Sandbox, keep: Path) -> str | None:
    """None when the sandbox works; else the last line of what went wrong."""
    probe = sandbox.wrap(["sh", "-c", "echo seen >gpudoctor-probe && rm gpudoctor-probe"], keep)
    try:
        result = subprocess.run(
            probe, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["mount failed"])[-1]
