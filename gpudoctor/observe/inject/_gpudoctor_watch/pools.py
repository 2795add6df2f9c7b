"""Native thread pools of this process: their sizes, asked of the libraries themselves.

A library is known by the name of its mapped file, and asked through ctypes on the handle that is loaded already.
"""

import ctypes
import os
import re
import sys

# library -> (pattern of its file, functions that give its number of threads, functions that set it)
_OPENBLAS = tuple(
    f"{prefix}openblas_{{}}_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
_KNOWN = (
    ("openblas", r"lib(scipy_)?openblas", _OPENBLAS),
    ("mkl", r"libmkl_rt", ("MKL_{}_Max_Threads", "MKL_{}_Num_Threads")),
    ("openmp", r"lib(g|i|)omp\d*|libomp", ("omp_{}_max_threads", "omp_{}_num_threads")),
)


def _libraries():
    found = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                path = line[line.find("/") :].rstrip("\n") if "/" in line else ""
                name = os.path.basename(path)
                if ".so" not in name or path in found:
                    continue
                for library, pattern, functions in _KNOWN:
                    if re.match(rf"({pattern})([-.]|\d)", name):
                        found[path] = (library, functions)
    except OSError:
        pass
    return found


def _function(handle, names, verb):
    for name in names:
        function = getattr(handle, name.format(verb), None)
        if function is not None:
            return function
    return None


def sizes():
    """[{library, threads}], the largest of each library."""
    result = {}
    for path, (library, names) in _libraries().items():
        try:
            function = _function(ctypes.CDLL(path), names, "Get" if library == "mkl" else "get")
            if function is not None:
                function.restype = ctypes.c_int
                result[library] = max(result.get(library, 0), int(function()))
        except (OSError, ValueError):  # noqa: PERF203 - one library must not cost the others
            continue
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        result["opencv"] = int(cv2.getNumThreads())
    return [{"library": name, "threads": threads} for name, threads in sorted(result.items()) if threads > 0]


def limit(threads):
    """Sets every known pool of this process."""
    for path, (library, names) in _libraries().items():
        try:
            function = _function(ctypes.CDLL(path), names, "Set" if library == "mkl" else "set")
            if function is not None:
                function.argtypes = [ctypes.c_int]
                function(threads)
        except (OSError, ValueError):  # noqa: PERF203 - one library must not cost the others
            continue
    cv2 = sys.modules.get("cv2")
    if cv2 is not None:
        cv2.setNumThreads(threads)
