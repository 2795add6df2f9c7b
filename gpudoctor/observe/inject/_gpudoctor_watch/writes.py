"""Notes, or refuses, writes to files below the user's directory.

Python's own ways to open a file raise audit events; torch.save and safetensors write in C++ and Rust, and are
asked at their door.
"""

import os
import sys

from _gpudoctor_watch.state import W, local

_deny = False
_root = ""
_record_dir = ""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = frozenset(
    ("open", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "sqlite3.connect")
)


def install(plan):
    global _deny, _root, _record_dir
    _deny = plan["guard_writes"] == "deny"
    _root = os.path.realpath(plan["write_root"] or W.cwd).rstrip(os.sep) + os.sep
    _record_dir = os.path.realpath(plan["record_dir"]).rstrip(os.sep) + os.sep
    sys.addaudithook(_audit)


def _audit(event, args):
    if event not in _EVENTS or local.guard:
        return
    if event == "open":
        path, mode, flags = args
        if isinstance(mode, str):
            if not ("w" in mode or "a" in mode or "+" in mode or "x" in mode):
                return
        elif not (isinstance(flags, int) and flags & _WRITING):
            return
        written(path)
    elif event == "os.rename":
        written(_below(args[0], args[2:3]), _below(args[1], args[3:4]))
    elif event == "os.link":
        written(_below(args[1], args[3:4]))
    elif event == "os.symlink":
        written(_below(args[1], args[2:3]))  # what a link points to is not written
    elif event in ("os.remove", "os.rmdir"):
        written(_below(args[0], args[1:2]))
    else:
        written(args[0])


def _below(path, folder):
    """A path relative to an open folder (shutil.rmtree names files so), as an absolute one."""
    if folder and isinstance(folder[0], int) and folder[0] >= 0 and not isinstance(path, int):
        try:
            return os.path.join(os.readlink(f"/proc/self/fd/{folder[0]}"), os.fsdecode(path))
        except OSError:
            return path
    return path


def written(*paths):
    """Notes those of the paths that are the user's; PermissionError when writes are refused."""
    local.guard = 1
    found = None
    try:
        for path in paths:
            name = _users(path)
            if name is None:
                continue
            found = name
            if name not in W.writes:
                W.writes.append(name)
                _append(name)
    except Exception:
        return
    finally:
        local.guard = 0
    if _deny and found is not None:
        raise PermissionError(13, "gpudoctor refuses writes to your files while it watches", found)


def _users(path):
    if isinstance(path, int):
        return None
    path = os.fspath(path)
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if path == ":memory:" or path.startswith(("/dev/", "/proc/", "/sys/")):
        return None
    folder, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(folder), name)
    if not real.startswith(_root) or real.startswith(_record_dir):
        return None
    inside = real[len(_root) :]
    if "__pycache__" in inside or inside.endswith((".pyc", ".pyo")) or "/.cache/" in "/" + inside:
        return None
    return inside


def _append(name):
    """Beside the record: loader workers and processes without torch have no record of their own."""
    line = os.fsencode(name).replace(b"\n", b"?") + b"\n"
    handle = os.open(os.path.join(W.plan["record_dir"], "writes.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def hook_torch(torch):
    writer = getattr(torch.serialization, "_open_zipfile_writer_file", None)
    if writer is None:
        return
    original = writer.__init__

    def __init__(self, name, *args, **kwargs):
        if isinstance(name, (str, bytes, os.PathLike)):
            written(name)
        original(self, name, *args, **kwargs)

    writer.__init__ = __init__


def hook_safetensors(module):
    original = module.serialize_file

    def serialize_file(tensor_dict, filename, *args, **kwargs):
        written(filename)
        return original(tensor_dict, filename, *args, **kwargs)

    module.serialize_file = serialize_file
