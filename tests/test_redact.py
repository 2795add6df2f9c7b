"""redact.py: nothing of whose machine it is stays, everything a diagnosis rests on does."""

from __future__ import annotations

import dataclasses

import pytest
import recorded

from gpudoctor import codec
from gpudoctor.model import (
    Case,
    Conflict,
    ConflictValue,
    Gap,
    Gpu,
    Host,
    Nic,
    Pair,
    Software,
    Source,
    Watched,
    WatchRecord,
)
from gpudoctor.redact import redact_case, redact_text

SECRETS = ("amsterdam", "alice", "10.1.2.3", "fe80::1234:5678", "a1b2c3d4-1111-2222-3333-444455556666", "1320921012345",
           "00:11:22:33:44:55", "0xb8599f0300fc6de2", "alice@example.com", "b859:9f03:00fc:6de2")  # fmt: skip


def secret_case() -> Case:
    uuid = "GPU-a1b2c3d4-1111-2222-3333-444455556666"
    record = WatchRecord(
        pid=7,
        argv=("/home/alice/train.py", "--out=/home/alice/out"),
        cwd="/home/alice",
        python="/home/alice/env/bin/python",
        exception="OSError: cannot reach 10.1.2.3:29500 from amsterdam",
        notes=("mail alice@example.com", "fe80::1234:5678%eth0"),
    )
    return Case(
        host=Host(hostname="amsterdam.example.com", os="linux", kernel="5.15.0.91", virtualization="kvm"),
        gpus=(
            Gpu(index=0, name="NVIDIA H100 80GB HBM3", bdf="0000:3b:00.0", uuid=uuid, serial="1320921012345"),
            Gpu(index=1, uuid="GPU-a1b2c3d4-1111-2222-3333-444455550000"),
        ),
        pairs=(Pair(a="gpu:0", b="gpu:1", path="NODE"),),
        nics=(Nic(name="mlx5_0", bdf="0000:5e:00.0"), Nic(name="enx001122334455")),
        software=Software(
            nvml="12.560.35.3",
            environment={"MASTER_ADDR": "amsterdam", "NCCL_TOPO_FILE": "/home/alice/topo.xml", "RANK": "0"},
        ),
        watched=Watched(
            command=("python", "/home/alice/train.py"),
            cwd="/home/alice",
            records=(record,),
            stderr_tail="amsterdam:4242:4250 [0] NCCL INFO guid 0xb8599f0300fc6de2 b859:9f03:00fc:6de2\n"
            "alice@amsterdam:~$ ip link 00:11:22:33:44:55",
        ),
        gaps=(Gap(path="gpus[GPU-a1b2c3d4-1111-2222-3333-444455550000].power_w", reason="not supported"),),
        sources=(Source(path="gpus[0000:3b:00.0]", origin="/home/alice/topo.txt", line=3),),
        conflicts=(
            Conflict(
                path=f"gpus[{uuid}].serial", values=(ConflictValue(value="1320921012345", origin="alice@amsterdam:~"),)
            ),
        ),
    )


@pytest.mark.parametrize("secret", SECRETS)
def test_secret_is_gone(secret: str) -> None:
    assert secret in codec.encode(secret_case())
    assert secret not in codec.encode(redact_case(secret_case()))


def test_facts_stay_and_the_case_is_still_valid() -> None:
    case = redact_case(secret_case())
    assert codec.decode(codec.encode(case), Case) == case
    assert (case.gpus[0].bdf, case.gpus[0].name) == ("0000:3b:00.0", "NVIDIA H100 80GB HBM3")
    assert case.pairs == secret_case().pairs
    assert case.software.nvml == "12.560.35.3"  # four numbers, but a version
    assert case.host.kernel == "5.15.0.91"
    assert case.nics[0] == secret_case().nics[0]
    assert case.watched is not None
    assert case.watched.command[1].endswith("/train.py")


def test_same_value_same_token() -> None:
    case = redact_case(secret_case())
    assert case.software.environment is not None
    assert case.watched is not None
    host = case.software.environment["MASTER_ADDR"]
    assert case.watched.stderr_tail.startswith(f"{host}:4242:4250 [0] NCCL INFO")
    assert case.gpus[0].uuid != case.gpus[1].uuid
    assert case.gaps[0].path == f"gpus[{case.gpus[1].uuid}].power_w"  # the key still finds its GPU
    assert case.conflicts[0].path == f"gpus[{case.gpus[0].uuid}].serial"
    assert case.conflicts[0].values[0].value == case.gpus[0].serial
    home = case.watched.cwd
    assert home.startswith("/home/user-")
    assert case.watched.records[0].argv[0] == f"{home}/train.py"


def test_redacting_twice_changes_nothing() -> None:
    once = redact_case(secret_case())
    assert redact_case(once) == once


@pytest.mark.parametrize("name", ["gpu", "vm", "linux", "train", "kvm", "node", "", ".*", "idle", "a\nb"])
def test_host_named_like_our_own_words(name: str) -> None:
    case = secret_case()
    case = dataclasses.replace(case, host=dataclasses.replace(case.host, hostname=name))
    redacted = redact_case(case)
    assert codec.decode(codec.encode(redacted), Case) == redacted
    assert redacted.pairs == case.pairs
    assert redacted.host.os == "linux"
    assert redacted.host.virtualization == "kvm"
    assert redacted.host.hostname in ("host-1", "")


@pytest.mark.parametrize("name", recorded.NAMES)
def test_recorded_machines_stay_valid(name: str) -> None:
    case = codec.decode((recorded.MACHINES / name / "case.json").read_text(), Case)
    redacted = redact_case(case)
    assert codec.decode(codec.encode(redacted), Case) == redacted
    assert case.host.hostname not in codec.encode(redacted)
    assert redacted.pairs == case.pairs
    assert [gap.path for gap in redacted.gaps] == [gap.path for gap in case.gaps]


@pytest.mark.parametrize(
    "text",
    [
        "0000:3b:00.0",
        "580.159.04",
        "12:30:45",
        "127.0.0.1:29500",
        "::1",
        "0-13,28-41",
        "train.py:45",
        "PXB",
        "1.25 1.10",
    ],
)
def test_what_only_looks_like_an_address_stays(text: str) -> None:
    assert redact_text(text) == text
