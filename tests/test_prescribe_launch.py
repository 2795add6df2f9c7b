"""The launch configuration: what is bound, what is not and why, and a script that runs and harms nobody."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpudoctor.errors import GpudoctorError
from gpudoctor.model import (
    Because,
    Case,
    Conflict,
    Finding,
    Gpu,
    Host,
    LaunchConfig,
    Limits,
    NumaNode,
    RankBinding,
    Software,
    Watched,
    WatchRecord,
)
from gpudoctor.prescribe.launch import launch_config, render
from gpudoctor.prescribe.placement import cpu_ranges

COMMAND = ("python", "train.py", "--lr", "0.1")
NODES = (NumaNode(node=0, cpus=(0, 1, 2, 3)), NumaNode(node=1, cpus=(4, 5, 6, 7)))


def gpu(index: int, node: int | None, **values: Any) -> Gpu:
    uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
    facts = {"name": "NVIDIA H100", "bdf": f"0000:{index + 1:02x}:00.0", "uuid": uuid, "numa_node": node, **values}
    return Gpu(index=index, **facts)


def machine(*nodes: int | None, **values: Any) -> Case:
    return Case(
        host=Host(cpu_count=8, virtualization="none"),
        gpus=tuple(gpu(index, node) for index, node in enumerate(nodes)),
        numa_nodes=NODES,
        limits=Limits(allowed_cpus=tuple(range(8))),
        **values,
    )


def reasons(config: LaunchConfig) -> str:
    return "\n".join(f"{each.line}: {each.reason}" for each in config.because)


def run(
    script: str, folder: Path, *arguments: str, numactl: str | None = 'echo "numactl $*" >> "$LOG"', **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with a numactl of ours on PATH (or none), which logs its options and starts the rest."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    fake = tools / "numactl"
    if numactl is not None:
        body = 'while [ "$1" != -- ] && [ "${1#-}" != "$1" ]; do shift; done; [ "$1" = -- ] && shift; exec "$@"'
        fake.write_text(f"#!/bin/bash\n{numactl}\n{body}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    for tool in ("bash", "true", "echo", "printf", "env"):
        target = Path("/usr/bin") / tool if (Path("/usr/bin") / tool).exists() else Path("/bin") / tool
        if not (tools / tool).exists():
            (tools / tool).symlink_to(target)
    path = folder / "launch.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    log = folder / "log"
    log.write_text("")
    return subprocess.run(
        [os.path.realpath("/bin/bash"), str(path), *arguments],
        env={"PATH": str(tools), "LOG": str(log), **environment},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_one_gpu_is_bound_to_its_node(tmp_path: Path) -> None:
    config = launch_config(machine(1), ("printf", "<%s>", "a b"))
    assert config.ranks == (RankBinding(rank=0, gpu="0000:01:00.0", cpus=(4, 5, 6, 7), numa_node=1),)
    assert config.env == {}
    assert "GPU 0000:01:00.0 is attached to NUMA node 1" in reasons(config)
    done = run(render(config), tmp_path, "$x", "c d")
    assert done.stdout == "<a b><$x><c d>"
    assert done.stderr == ""
    assert "numactl --physcpubind=4-7 --preferred=1 -- printf" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("numactl", [None, "exit 1"])
def test_without_a_working_numactl_it_runs_unbound(tmp_path: Path, numactl: str | None) -> None:
    done = run(render(launch_config(machine(1), ("printf", "ran"))), tmp_path, numactl=numactl)
    assert done.stdout == "ran"
    assert "starting unbound" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (machine(None), "NUMA node of GPU 0 is not known"),
        (dataclasses.replace(machine(0), host=Host(virtualization="kvm")), "virtual machine"),
        (dataclasses.replace(machine(0), numa_nodes=NODES[:1]), "one NUMA node"),
        (dataclasses.replace(machine(0), numa_nodes=()), "not known"),
        (machine(7), "not known"),
        (machine(0, conflicts=(Conflict(path="gpus[0000:01:00.0].numa_node", values=()),)), "disagree"),
    ],
)
def test_nothing_is_bound_when_locality_is_unknown(case: Case, word: str) -> None:
    config = launch_config(case, COMMAND)
    assert all(rank.cpus is None and rank.numa_node is None for rank in config.ranks)
    assert "nothing is bound" in reasons(config)
    assert word in reasons(config)
    assert "numactl" not in render(config)
    assert word in render(config)


def test_a_finding_forbids_binding() -> None:
    finding = Finding(rule="NUM007", name="n", severity="unknown", subject="host", message="m")
    config = launch_config(machine(0), COMMAND, findings=[finding])
    assert "NUM007" in render(config)
    assert "numactl" not in render(config)


def test_a_cpuset_cuts_the_binding_and_may_forbid_it() -> None:
    cut = dataclasses.replace(machine(1), limits=Limits(allowed_cpus=(2, 3, 4, 6)))
    assert launch_config(cut, COMMAND).ranks[0].cpus == (4, 6)
    none = dataclasses.replace(machine(1), limits=Limits(allowed_cpus=(0, 1)))
    config = launch_config(none, COMMAND)
    assert config.ranks[0].cpus is None
    assert "no CPU of NUMA node 1 is allowed" in render(config)
    memory = dataclasses.replace(machine(1), limits=Limits(allowed_cpus=tuple(range(8)), allowed_nodes=(0,)))
    assert launch_config(memory, COMMAND).ranks[0].numa_node is None


def test_memory_only_nodes_are_no_place_for_a_rank() -> None:
    case = dataclasses.replace(machine(2), numa_nodes=(*NODES, NumaNode(node=2)))
    assert launch_config(case, COMMAND).ranks[0].numa_node is None
    case = dataclasses.replace(case, gpus=(gpu(0, 2, numa_nodes=(1, 2)),))
    assert launch_config(case, COMMAND).ranks[0].numa_node == 1


def test_ranks_are_bound_by_bus_address_not_by_number(tmp_path: Path) -> None:
    case = machine(1, 0, None)
    config = launch_config(dataclasses.replace(case, gpus=case.gpus[:2]), ("bash", "-c", 'echo "$*"', "x"), nproc=2)
    assert [(rank.gpu, rank.numa_node) for rank in config.ranks] == [("0000:01:00.0", 1), ("0000:02:00.0", 0)]
    assert config.env == {"CUDA_VISIBLE_DEVICES": f"{gpu(0, 1).uuid},{gpu(1, 0).uuid}"}
    script = render(config)
    assert "--nproc_per_node=2" in script
    assert "--numa-binding" not in script  # the torch version is not known
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(
        '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done; shift\n'
        'for LOCAL_RANK in 0 1; do export LOCAL_RANK; "$@"; done\necho "$CUDA_VISIBLE_DEVICES" >> "$LOG"\n'
    )
    torchrun.chmod(0o755)
    done = run(script, tmp_path, "more words")
    assert done.stdout == "more words\nmore words\n", done.stderr
    log = [line for line in (tmp_path / "log").read_text().splitlines() if "true" not in line]
    assert log[0].startswith("numactl --physcpubind=4-7 --preferred=1 -- bash")
    assert log[1].startswith("numactl --physcpubind=0-3 --preferred=0 -- bash")
    assert log[2] == config.env["CUDA_VISIBLE_DEVICES"]
    (tmp_path / "bin" / "numactl").unlink()
    assert run(script, tmp_path, "more words", numactl=None).stdout == "more words\nmore words\n"


@pytest.mark.parametrize(("torch", "used"), [("2.9.0", True), ("2.13.0+cpu", True), ("2.8.1", False), ("x", False)])
def test_numa_binding_only_in_versions_that_have_it(torch: str, used: bool) -> None:
    config = launch_config(machine(0, 1, software=Software(torch=torch)), COMMAND, nproc=2)
    assert ("--numa-binding=node" in render(config)) == used
    unknown = launch_config(machine(0, None, software=Software(torch=torch)), COMMAND, nproc=2)
    assert "--numa-binding" not in render(unknown)  # torch would take node 0 for an unknown one


def test_torchrun_of_this_torch_takes_the_script(tmp_path: Path) -> None:
    """The real torchrun: two gloo-less ranks, the binding left out, arguments passed through."""
    import sys

    (tmp_path / "train.py").write_text(
        "import os, sys, pathlib\npathlib.Path(f\"rank{os.environ['LOCAL_RANK']}\").write_text(repr(sys.argv[1:]))\n"
    )
    case = machine(None, None)
    config = launch_config(case, (sys.executable, "-u", "train.py", "a b"), nproc=2)
    (tmp_path / "launch.sh").write_text(render(config))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_VISIBLE")}
    done = subprocess.run(
        ["bash", "launch.sh", "$c", "--d"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == "['a b', '$c', '--d']"


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "--nproc_per_node=2", "train.py"),
        ("accelerate", "launch", "--num_processes", "2", "train.py"),
        ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"),
        ("/opt/env/bin/torchrun", "--nproc-per-node=2", "train.py"),
    ],
)
def test_a_launcher_of_the_user_keeps_its_arguments(command: tuple[str, ...]) -> None:
    config = launch_config(machine(0, 1), command)
    assert len(config.ranks) == 2
    script = render(config)
    assert f'exec -- {" ".join(command)} "$@"\n' in script
    assert "export CUDA_VISIBLE_DEVICES=GPU-" in script
    assert render(config, "torchrun") == script
    assert "# rank 1: GPU 0000:02:00.0 is attached to NUMA node 1" in script


def test_a_plain_command_on_many_gpus_keeps_them_all() -> None:
    config = launch_config(machine(0, 1), COMMAND)
    assert config.env == {}
    assert config.ranks == (RankBinding(rank=0, gpu=None),)
    assert "which of them it uses was not seen" in render(config)
    record = WatchRecord(pid=1, device="cuda:1")
    seen = machine(0, 1, watched=Watched(command=COMMAND, cwd="/", records=(record,)))
    config = launch_config(seen, COMMAND)
    assert config.ranks[0].gpu == "0000:02:00.0"
    assert config.ranks[0].numa_node == 1
    assert "CUDA_VISIBLE_DEVICES" not in config.env


def test_watched_ranks_decide() -> None:
    records = tuple(WatchRecord(pid=rank, rank=rank, local_rank=rank, world_size=2) for rank in (0, 1))
    case = machine(0, 1, watched=Watched(command=("sh", "run.sh"), cwd="/", records=records))
    assert len(launch_config(case, ("sh", "run.sh")).ranks) == 2


def test_visible_devices_of_the_user_are_kept() -> None:
    case = machine(0, 1, software=Software(environment={"CUDA_VISIBLE_DEVICES": "1,0"}))
    config = launch_config(case, COMMAND, nproc=2)
    assert config.env == {}
    assert [rank.gpu for rank in config.ranks] == ["0000:02:00.0", "0000:01:00.0"]
    case = machine(0, 1, software=Software(environment={"CUDA_VISIBLE_DEVICES": "$(reboot)"}))
    assert [rank.gpu for rank in launch_config(case, COMMAND).ranks] == [None]


def test_without_uuids_the_order_is_fixed() -> None:
    case = dataclasses.replace(machine(0, 1), gpus=(gpu(0, 0, uuid="gpu-a"), gpu(1, 1, uuid=None)))
    config = launch_config(case, COMMAND, nproc=2)
    assert config.env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}


def test_mig_is_left_to_the_user() -> None:
    case = dataclasses.replace(machine(0, 1), gpus=(gpu(0, 0, mig=True), gpu(1, 1)))
    config = launch_config(case, COMMAND, nproc=2)
    assert config.env == {}
    assert "MIG" in reasons(config)


def test_threads_follow_a_quota_only(tmp_path: Path) -> None:
    assert "OMP_NUM_THREADS" not in launch_config(machine(0, 1), COMMAND, nproc=2).env
    case = dataclasses.replace(machine(0), limits=Limits(allowed_cpus=tuple(range(8)), cpu_quota=3.5))
    config = launch_config(case, ("bash", "-c", "echo $OMP_NUM_THREADS"))
    assert config.env == {"OMP_NUM_THREADS": "3"}
    assert "quota is 3.5" in reasons(config)
    assert run(render(config), tmp_path).stdout == "3\n"
    assert run(render(config), tmp_path, OMP_NUM_THREADS="5").stdout == "5\n"  # a value that is set is kept
    own = dataclasses.replace(case, software=Software(environment={"OMP_NUM_THREADS": "2"}))
    assert launch_config(own, COMMAND).env == {}


def test_no_gpu_just_runs_the_command(tmp_path: Path) -> None:
    for case in (Case(), Case(gpus=(Gpu(index=0, lost=True),))):
        config = launch_config(case, ("printf", "%s", "hello"))
        assert config.ranks == ()
        assert "no usable GPU" in render(config)
        assert run(render(config), tmp_path).stdout == "hello"
        assert run(render(config, "plain"), tmp_path).stdout == "hello"


def test_the_forms() -> None:
    config = launch_config(machine(0), COMMAND)
    assert "torch.distributed.run --standalone --nproc_per_node=1 --no-python -- bash" in render(config, "torchrun")
    two = launch_config(machine(0, 1), COMMAND, nproc=2)
    assert "torch.distributed" in render(two)
    assert "torch.distributed" not in render(two, "plain")


@pytest.mark.parametrize("command", [(), ("-a", "x"), ("python", "a\0b")])
def test_commands_that_cannot_start(command: tuple[str, ...]) -> None:
    with pytest.raises(GpudoctorError):
        launch_config(machine(0), command)


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(GpudoctorError, match="3 ranks were asked for"):
        launch_config(machine(0, 1), COMMAND, nproc=3)


HOSTILE = 'x\'; touch pwned; "$(touch pwned)" `touch pwned` \n touch pwned \r \x1b[31m \u2028 ${IFS} # &'


@pytest.mark.parametrize("form", ["auto", "torchrun", "plain"])
def test_hostile_values_are_inert(tmp_path: Path, form: Any) -> None:
    config = LaunchConfig(
        command=("printf", "%s|", HOSTILE),
        env={"GOOD": HOSTILE, "BAD; touch pwned": "1", "A\nB": "2"},
        ranks=(RankBinding(rank=0, gpu=HOSTILE, cpus=(0,), numa_node=0, nic=HOSTILE),),
        because=tuple(
            Because(line=line, reason=HOSTILE) for line in ("command", "GOOD", "rank 0", HOSTILE, "rank \n x")
        ),
    )
    script = render(config, form)
    assert "\x1b" not in "".join(line for line in script.split("\n") if line.startswith("#"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(
        '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done; shift\nLOCAL_RANK=0 exec "$@"\n'
    )
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    (tmp_path / "bin" / "touch").symlink_to("/usr/bin/touch")
    done = run(script, tmp_path, HOSTILE)
    assert done.stdout == f"{HOSTILE}|{HOSTILE}|".replace("\r", "\n"), done.stderr  # text mode turns \r into \n
    assert "GOOD" not in done.stderr
    assert not list(tmp_path.rglob("pwned"))


def test_a_hostile_case_is_inert(tmp_path: Path) -> None:
    case = dataclasses.replace(
        machine(1, 0), gpus=(gpu(0, 1, bdf=HOSTILE, uuid=HOSTILE, name=HOSTILE), gpu(1, 0, uuid=HOSTILE, bdf=HOSTILE)),
        software=Software(torch=HOSTILE, environment={"X": HOSTILE}),
    )  # fmt: skip
    config = launch_config(case, ("printf", "ok"), nproc=2)
    script = render(config, "plain")
    done = run(script, tmp_path)
    assert done.stdout == "ok"
    assert not list(tmp_path.rglob("pwned"))


def test_ranges() -> None:
    assert cpu_ranges((0, 1, 2, 8, 10, 11)) == "0-2,8,10-11"
    assert cpu_ranges(()) == ""
