"""Builds all_reduce_perf of nccl-tests from its sources with the CUDA compiler and the NCCL that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class Build:
    """A build that runs while something else is measured; `program` exists when wait() found no problem."""

    def __init__(self, sources: Path, log: Path) -> None:
        self.log = log
        self.work = Path(tempfile.mkdtemp(prefix="nccl-tests-"))
        self.program = self.work / "build" / "all_reduce_perf"
        self.libraries: list[Path] = []
        self.problem: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        nvcc, nccl = shutil.which("nvcc") or _usual_nvcc(), nccl_folder()
        if not (sources / "src" / "all_reduce.cu").exists():
            self.problem = f"{sources} holds no nccl-tests"
        elif nvcc is None:
            self.problem = "no nvcc"
        elif nccl is None:
            self.problem = "no NCCL with headers"
        elif shutil.which("make") is None:
            self.problem = "no make"
        else:
            self._start(sources.resolve(), Path(nvcc).resolve(), nccl)

    def _start(self, sources: Path, nvcc: Path, nccl: Path) -> None:
        cuda = nvcc.parents[1]
        runtime = first_library("libcudart.so*", cuda)
        if runtime is None:
            self.problem = f"no libcudart below {cuda} or in the pip packages"
            return
        # pip's packages have libnccl.so.2 and libcudart.so.13 without the plain names that a linker looks for
        home = self.work / "nccl"
        (home / "lib").mkdir(parents=True)
        (home / "include").symlink_to(nccl / "include")
        library = next(iter(sorted((nccl / "lib").glob("libnccl.so*"))))
        (home / "lib" / "libnccl.so").symlink_to(library)
        lib = self.work / "cuda"
        lib.mkdir()
        (lib / "libcudart.so").symlink_to(runtime)
        self.libraries = [library.parent, runtime.parent]
        copy = self.work / "sources"
        shutil.copytree(sources, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "build"))
        program, build = self.program, self.work / "build"
        paths = {"CUDA_HOME": cuda, "NVCC": nvcc, "CUDA_LIB": lib, "NCCL_HOME": home, "BUILDDIR": build}
        given = [f"{name}={path}" for name, path in paths.items()]
        words = ["make", "-C", str(copy / "src"), "-j", "8", "MPI=0", "NVCC_GENCODE=-arch=native", *given, str(program)]
        with self.log.open("wb") as said:
            said.write((" ".join(words) + "\n").encode())
            said.flush()
            self.process = subprocess.Popen(
                words, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self, seconds: float) -> str | None:
        """Why there is no program, or None."""
        if self.process is not None and self.problem is None:
            try:
                code = self.process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                self.stop()
                self.problem = f"not ready {seconds:.0f} s after it was wanted"
            else:
                said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
                if code or not self.program.exists():
                    self.problem = f"make ended with {code}: {said[-1][:300] if said else ''}"
        return self.problem

    def stop(self) -> None:
        import signal

        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.work, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        paths = [*map(str, self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def _usual_nvcc() -> str | None:
    usual = Path("/usr/local/cuda/bin/nvcc")
    return str(usual) if usual.exists() else None


def pip_folders() -> list[Path]:
    """The folders of NVIDIA's pip packages (nvidia/nccl, nvidia/cu13, ...)."""
    found = importlib.util.find_spec("nvidia")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return [folder for place in places for folder in sorted(Path(place).iterdir()) if folder.is_dir()]


def nccl_folder() -> Path | None:
    """A folder with include/nccl.h and lib/libnccl.so*: pip's NCCL (torch's own) first, then the system's."""
    for folder in [*pip_folders(), Path("/usr/local/nccl"), Path("/usr/local/cuda"), Path("/usr")]:
        if (folder / "include" / "nccl.h").exists() and any((folder / "lib").glob("libnccl.so*")):
            return folder
    return None


def first_library(pattern: str, cuda: Path) -> Path | None:
    for folder in [cuda / "lib64", cuda / "lib", cuda / "targets" / "x86_64-linux" / "lib"]:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    for folder in pip_folders():
        if found := sorted((folder / "lib").glob(pattern)):
            return found[0]
    return None
