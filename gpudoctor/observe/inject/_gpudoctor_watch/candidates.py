"""Runs loader candidates in the user's process, when the loader in question is first iterated.

From then on the process serves gpudoctor over a socket: one JSON line a request, one a reply. Whatever touches the
dataset, or may fail, is done in a forked child with a deadline, so that this process stays as it was found and each
candidate starts from the same state. The user's code goes on only when it is asked to ("continue": to see what a
step costs), and never beyond.
"""

import atexit
import json
import os
import socket
import sys
import time

from _gpudoctor_watch import children, in_worker, record, state
from _gpudoctor_watch.state import W, clock

_host = None


def wanted(loader, info):
    """Whether this request for an iterator is the one to take."""
    plan = W.plan["loader_search"]
    if plan is None or _host is not None or os.environ.get(in_worker.ENVIRONMENT):
        return False
    if plan.get("site"):
        return info.site == plan["site"]
    if _feeds_training(info):
        return True
    return not any(_feeds_training(other) for other in W.loaders) and W.torch.is_grad_enabled()


def _feeds_training(info):
    facts = info.settings
    return bool(facts["shuffle"] or facts["drop_last"] or facts["iterable_dataset"])


def take(loader, info):
    """Serve until gpudoctor says how to go on. Returns only for "continue"."""
    global _host
    _host = Host(loader, info)
    _host.hello()
    _host.serve()


def after_step(steps, may_stop):
    """Serve on once the steps that "continue" allowed are done, or their time is over."""
    if _host is not None and _host.going and ((steps >= _host.allowed and may_stop) or clock() > _host.until):
        resume()


def resume():
    """The user's loop has gone as far as it was allowed, or has ended by itself: serve on, and never return."""
    if _host is None or not _host.going:
        return
    _host.going = False
    _host.steps_seen()
    _host.serve()
    os._exit(0)


class Host:
    def __init__(self, loader, info):
        self.loader, self.info = loader, info
        self.folder = W.plan["record_dir"]
        self.count = 0
        self.cpu = 0.0
        self.going, self.allowed, self.until = False, 0, 0.0
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel.connect(W.plan["loader_search"]["socket"])
        self.lines = self.channel.makefile("rb")

    # --- the dialogue

    def send(self, message):
        self.channel.sendall(json.dumps(message, allow_nan=False).encode() + b"\n")

    def hello(self):
        import multiprocessing

        torch = W.torch
        context = getattr(self.loader, "multiprocessing_context", None)
        method = getattr(context, "get_start_method", None)
        self.send(
            {
                "hello": {
                    "pid": os.getpid(),
                    "rank": _number("RANK"),
                    "local_rank": _number("LOCAL_RANK"),
                    "local_ranks": _number("LOCAL_WORLD_SIZE") or 1,
                    "start_method": str(method() if method is not None else multiprocessing.get_start_method()),
                    "cuda": bool(torch.cuda.is_initialized()),
                    "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                    "torch": str(torch.__version__),
                    "numpy": str(getattr(sys.modules.get("numpy"), "__version__", "")),
                    "sources": _sources(self.loader),
                    "loader": {
                        "site": self.info.site,
                        "ordinal": self.info.ordinal,
                        "role": "unknown",
                        **self.info.settings,
                    },
                    **_limits(),
                }
            }
        )

    def serve(self):
        """Requests one by one; a closed socket means that nobody waits any more."""
        while True:
            line = self.lines.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            what = request["do"]
            if what == "end":
                W.ended = "steps" if W.step_count else "exit"
                record.write(final=True)
                self.send({"ended": True})
                os._exit(0)
            if what == "continue":
                self._go_on(request)
                self.send({"going": True})
                return
            self.send(self._answer(what, request))

    def _answer(self, what, request):
        try:
            if what == "preflight":
                return self._preflight(request)
            if what == "fetch":
                from _gpudoctor_watch import probe

                probe.DEADLINE_S = request["deadline_s"]
                return {"value": probe.probe(self.loader, self.info)}
            if what == "trial":
                return self._trial(request)
            return {"fault": {"kind": "lost", "text": f"unknown request {what!r}"}}
        except Exception as error:
            return {"fault": {"kind": "lost", "text": f"{type(error).__name__}: {str(error)[:300]}"}}

    def _go_on(self, request):
        """The user's own loop runs for some steps. With workers the dataset stays untouched here."""
        from _gpudoctor_watch import loaders

        loaders._override(self.loader, request["arguments"])
        atexit.register(resume)
        self.cpu = time.thread_time()
        self.allowed, self.until = request["steps"], clock() + request["seconds"]
        self.going = True

    def steps_seen(self):
        """What the loop did meanwhile; its workers are ended, so that they disturb no trial."""
        for reference in self.info.alive:
            shutdown = getattr(reference(), "_shutdown_workers", None)
            if shutdown is not None:
                try:
                    shutdown()
                except Exception as error:
                    W.failed("workers of the watched steps", error)
        steps = [{"wall_ms": values[0], "loader_wait_ms": values[1]} for values in W.steps]
        from _gpudoctor_watch import steps as stepping

        cpu_ms = 1e3 * (time.thread_time() - self.cpu) / max(1, len(steps))
        self.send(
            {
                "steps": steps,
                "cpu_ms": cpu_ms,
                "source": stepping.NAMES[W.source_rank],
                "cuda": W.torch.cuda.is_initialized(),
            }
        )

    # --- jobs in a child

    def _preflight(self, request):
        from _gpudoctor_watch import preflight

        return self._in_child(
            lambda mapped, folder: preflight.look(self.loader, request["seconds"], mapped, folder), request, {}
        )

    def _trial(self, request):
        from _gpudoctor_watch import trial

        settings = {"follow": bool(request.get("follow")), "hash": True, "one_thread": bool(request.get("one_thread"))}
        if request.get("device"):
            return self._here(request, settings)
        return self._in_child(lambda mapped, folder: trial.run(self.loader, request, mapped), request, settings)

    def _here(self, request, settings):
        """Pinning needs this process's CUDA context, which no forked child can use; so such trials come last."""
        from _gpudoctor_watch import trial

        W.active = False
        folder = self._folder()
        counters = os.path.join(folder, "counters")
        os.environ[in_worker.ENVIRONMENT] = json.dumps({**settings, "folder": folder, "counters": counters})
        mapped = in_worker.create(counters)
        try:
            return {"value": trial.run(self.loader, request, mapped), **children.told(mapped, folder)}
        except Exception as error:
            return {"fault": {"kind": "exception", **in_worker.describe_error(error)}}
        finally:
            del os.environ[in_worker.ENVIRONMENT]

    def _folder(self):
        self.count += 1
        folder = os.path.join(self.folder, f"trial-{os.getpid()}-{self.count}")
        os.mkdir(folder)
        return folder

    def _in_child(self, work, request, settings):
        return children.run(work, self._folder(), settings, deadline_s=request["deadline_s"], hang_s=request["hang_s"])


def _limits():
    """What holds the number of workers here: memory and open files."""
    import resource

    available = None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        pass
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    strategy = getattr(sys.modules.get("torch.multiprocessing"), "get_sharing_strategy", lambda: None)()
    return {
        "memory_bytes": available,
        "files": files if files != resource.RLIM_INFINITY else None,
        "files_open": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "sharing": strategy,
    }


def _number(name):
    """An integer of the environment that a launcher sets, or None."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def _sources(loader):
    """Files and names of the code that runs in workers: the dataset's class, collate and worker_init functions."""
    import inspect

    found = []
    for value in (type(loader.dataset), loader.collate_fn, loader.worker_init_fn):
        target = value if inspect.isclass(value) or inspect.isfunction(value) else type(value)
        try:
            path = inspect.getsourcefile(target)
        except (TypeError, OSError):
            continue
        if path and "/torch/" not in path.replace("\\", "/"):
            found.append({"file": state.shown_path(os.path.realpath(path)), "name": target.__qualname__})
    return found
