"""Every rule's examples run, its documentation has its headings, its code and severity are the catalogue's."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from pathlib import Path

import pytest

from gpudoctor import profiles, rules
from gpudoctor.model import Case, Example, Gpu, Measurement, PcieLink, RuleModule, Step, Watched, WatchRecord
from gpudoctor.rules import evidence, needs

# Code, name and severity as the project's rule catalogue has them; SWV010 and SYN012 are outside it.
CATALOGUE = {
    "PCI001": ("link-width-below-max", "error"),
    "PCI002": ("link-gen-below-max-under-load", "error"),
    "PCI003": ("link-speed-unknown-at-idle", "unknown"),
    "NUM001": ("gpus-span-numa-nodes", "info"),
    "NUM005": ("cpuset-excludes-gpu-node", "error"),
    "NUM007": ("numa-locality-unknown", "unknown"),
    "P2P001": ("p2p-not-supported", "info"),
    "CTR001": ("shm-too-small", "error"),
    "CTR007": ("cpu-quota-below-workers", "warning"),
    "HLT012": ("thermal-limit", "error"),
    "SWV005": ("driver-not-loaded", "critical"),
    "SWV010": ("sources-disagree", "unknown"),
    "LDR001": ("workers-zero", "warning"),
    "LDR003": ("pin-memory-off", "warning"),
    "LDR020": ("loader-not-the-bottleneck", "info"),
    "LDR004": ("pin-memory-not-worth-it", "info"),
    "LDR005": ("storage-bound", "warning"),
    "LDR006": ("too-many-workers", "warning"),
    "LDR007": ("fewer-active-workers-than-asked", "warning"),
    "LDR008": ("head-of-line-blocking", "warning"),
    "LDR009": ("worker-affinity-narrow", "error"),
    "LDR010": ("worker-memory-grows", "warning"),
    "LDR013": ("fork-after-threads", "error"),
    "LDR015": ("unpicklable-under-spawn", "error"),
    "LDR016": ("worker-hang", "error"),
    "LDR018": ("numpy-seed-shared", "warning"),
    "LDR019": ("snapshot-every-step", "warning"),
    "LCH006": ("cpu-thread-oversubscription", "warning"),
    "CTR008": ("open-files-limit", "error"),
    "CTR009": ("host-memory-exhausted", "error"),
    "LDR014": ("tokenizers-fork-notice", "info"),
    "LDR021": ("step-waits-for-loader", "warning"),
    "LDR023": ("per-row-fetching", "warning"),
    "SYN001": ("host-read-in-hot-loop", "warning"),
    "SYN005": ("explicit-synchronize-per-step", "warning"),
    "SYN006": ("empty-cache-per-step", "warning"),
    "SYN010": ("sync-gain-capped", "info"),
    "SYN011": ("launch-bound-step", "warning"),
    "CPY001": ("blocking-copy-in-loop", "warning"),
    "CPY010": ("copy-not-overlapped", "info"),
    "BND013": ("rank-late-to-collectives", "warning"),
    "SYN002": ("branch-on-device-tensor", "warning"),
    "SYN003": ("print-of-device-tensor", "warning"),
    "SYN004": ("data-dependent-shape", "warning"),
    "SYN007": ("operation-with-hidden-sync", "warning"),
    "SYN008": ("anomaly-detection-left-on", "warning"),
    "SYN009": ("optimizer-not-fused", "info"),
    "SYN012": ("synchronize-one-device-only", "info"),
    "CPY002": ("non-blocking-without-pinning", "warning"),
    "CPY003": ("device-to-host-every-step", "warning"),
    "CPY004": ("constant-moved-each-step", "warning"),
    "CPY005": ("pin-in-main-thread", "warning"),
    "CPY006": ("tensor-built-on-host", "warning"),
    "CPY007": ("checkpoint-every-step", "warning"),
    "CPY008": ("host-read-before-copy-done", "error"),
    "CPY009": ("side-stream-without-ordering", "error"),
    "LDR002": ("workers-not-persistent", "warning"),
    "LDR011": ("cuda-in-worker", "error"),
    "LDR012": ("handle-opened-before-fork", "error"),
    "LDR017": ("sample-count-wrong", "error"),
    "LDR022": ("distributed-sampler-missing", "error"),
    "LCH017": ("device-from-global-rank", "error"),
    "LCH018": ("ranks-share-a-gpu", "warning"),
    "SWV009": ("removed-or-deprecated-interface", "info"),
    "PLN014": ("find-unused-parameters-on", "info"),
    "PLN017": ("single-process-multi-gpu", "warning"),
    "PLN018": ("fsdp-without-wrap-policy", "warning"),
    "BND001": ("bandwidth-as-expected", "info"),
    "BND002": ("bandwidth-fits-narrower-link", "warning"),
    "BND003": ("one-device-slower-than-peers", "warning"),
    "BND004": ("sm-copy-not-link-rate", "info"),
    "BND005": ("measurement-above-peak", "warning"),
    "BND006": ("one-way-copy-accounting", "info"),
    "BND007": ("bidirectional-contention", "info"),
    "BND008": ("pageable-copy-signature", "warning"),
    "BND009": ("peer-bandwidth-groups", "info"),
    "BND010": ("figure-needs-more-facts", "unknown"),
    "BND011": ("unstable-measurement", "unknown"),
    "BND012": ("all-reduce-below-expected", "warning"),
    "NUM002": ("gpus-on-one-node", "info"),
    "NUM003": ("gpu-order-not-numa-order", "info"),
    "NUM004": ("gpus-uneven-over-nodes", "warning"),
    "NUM006": ("few-cpus-per-gpu", "warning"),
    "NUM008": ("grace-memory-only-nodes", "warning"),
    "NUM009": ("numa-nodes-per-socket-setting", "unknown"),
    "NUM010": ("remote-node-host-memory", "warning"),
    "NVL001": ("nvlink-links-missing", "error"),
    "NVL003": ("nvlink-p2p-broken", "error"),
    "NVL004": ("nvlink-bridge-absent", "info"),
    "NVL005": ("nvlink-not-all-to-all", "info"),
    "P2P002": ("p2p-refused-by-chipset", "warning"),
    "P2P003": ("p2p-grant-unverified", "unknown"),
    "P2P004": ("p2p-advertised-but-broken", "error"),
    "P2P005": ("p2p-slower-than-staged", "warning"),
    "P2P006": ("acs-redirect-on-p2p-path", "error"),
    "P2P007": ("iommu-breaks-p2p", "error"),
    "P2P008": ("no-p2p-shared-uplink", "warning"),
    "PCI004": ("path-narrower-than-endpoint", "warning"),
    "PCI005": ("link-errors-rising", "warning"),
    "PCI006": ("bar1-unassigned", "error"),
    "PCI007": ("bar1-window-small", "info"),
    "PCI008": ("uplink-shared", "warning"),
}
HEADINGS = ("What it means", "Why it costs", "How we know", "Fix", "When to ignore")
RULES = rules.all_rules()
EXAMPLES = [
    pytest.param(module, example, id=f"{module.RULE.code}-{example.name}")
    for module in RULES
    for example in module.EXAMPLES
]


def run(module: RuleModule, case: Case) -> rules.RulesReport:
    return rules.run_rules(case, select=[module.RULE.code])


@pytest.mark.parametrize(("module", "example"), EXAMPLES)
def test_example(module: RuleModule, example: Example) -> None:
    report = run(module, example.case)
    assert report.errors == ()
    if example.kind == "fires":
        assert example.subjects, "an example that fires names its subjects"
        assert sorted(finding.subject for finding in report.findings) == sorted(example.subjects)
        assert {finding.severity for finding in report.findings} == {example.severity or module.RULE.severity}
    elif example.kind == "quiet":
        assert report.findings == ()
        assert report.not_checked == ()
        assert report.clean == (module.RULE.code,)
    else:
        assert report.findings == ()
        assert report.clean == ()
        assert [entry.rule for entry in report.not_checked] == [module.RULE.code] * len(report.not_checked)
        assert report.not_checked


@pytest.mark.parametrize("module", RULES, ids=lambda module: module.RULE.code)
def test_declaration(module: RuleModule) -> None:
    rule = module.RULE
    assert CATALOGUE[rule.code] == (rule.name, rule.severity)
    document = inspect.cleandoc(module.__doc__ or "")
    assert re.findall(r"(?m)^([A-Z][A-Za-z ]+)$", document) == list(HEADINGS)
    assert all(re.search(rf"(?m)^{heading}\n    \S", document) for heading in HEADINGS)
    kinds = {example.kind for example in module.EXAMPLES}
    # What needs no fact cannot lack any.
    assert kinds == ({"fires", "quiet"} if rule.code == "SWV010" else {"fires", "quiet", "lacks"})
    at_catalogue = [e for e in module.EXAMPLES if e.kind == "fires" and e.severity in (None, rule.severity)]
    assert at_catalogue, "an example fires at the catalogue's severity"
    for need in rule.needs:
        needs.missing(
            Case(gpus=(Gpu(index=0, pcie=PcieLink()),)), [need]
        )  # raises for a field that the Case does not have
    text = rules.rule_documentation(module)
    assert text.startswith(f"{rule.code} {rule.name} ({rule.severity})")
    for name in profiles.thresholds().get(rule.code, {}):
        assert name in text


def test_all_rules_of_the_catalogue_are_found_and_sorted() -> None:
    codes = [module.RULE.code for module in RULES]
    assert codes == sorted(CATALOGUE)
    assert len({module.RULE.name for module in RULES}) == len(codes)


@pytest.mark.parametrize(("module", "example"), [p for p in EXAMPLES if p.values[1].kind == "fires"])
def test_findings_are_complete(module: RuleModule, example: Example) -> None:
    for finding in run(module, example.case).findings:
        assert (finding.rule, finding.name) == (module.RULE.code, module.RULE.name)
        assert finding.evidence
        assert finding.remedies
        assert "\n" not in finding.message
        if finding.severity != module.RULE.severity:
            # A severity is lowered only, and the message says why.
            assert finding.severity in ("unknown", "info", "warning")
            assert re.search(r"[;,:]", finding.message)
        if finding.severity == "unknown" and module.RULE.severity != "unknown":
            assert any(remedy.kind in ("measure", "bios", "hardware") for remedy in finding.remedies)
        gain = finding.gain
        if gain is not None:
            assert gain.low <= gain.high
            assert gain.source
            # What was not tried promises nothing: the low end of a factor is 1.
            assert gain.low == 1 if gain.unit == "x" else gain.low > 0


def test_nothing_is_promised_beyond_the_waiting_share() -> None:
    for code in ("LDR001", "LDR003", "LDR021", "LDR023", "SYN001", "SYN005", "SYN006", "CPY001"):
        module = rules.find_rule(code)
        for example in module.EXAMPLES:
            for finding in run(module, example.case).findings if example.case.watched is not None else ():
                assert example.case.watched is not None
                record = example.case.watched.records[0]
                total = sum(step.wall_ms for step in record.steps)
                waits = [
                    *(loader.wait_ms for loader in record.loaders),
                    *(copy.waited_ms for copy in record.copies),
                    *(sync.waited_ms for sync in record.syncs),
                ]
                assert finding.gain is not None
                assert 1 < finding.gain.high <= total / (total - max(waits)) + 1e-3


def test_thresholds_are_used_by_their_rule() -> None:
    """Each limit in the file is read in the family of its rule, and each rule reads only its own."""
    for code, limits in profiles.thresholds().items():
        module = rules.find_rule(code)
        tree = ast.parse(
            Path(inspect.getsourcefile(typing.cast("typing.Any", module)) or "").read_text(encoding="utf-8")
        )
        asked = {
            node.args[1].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "threshold"
            and isinstance(node.args[1], ast.Constant)
        }
        assert asked == set(limits)


def test_rules_read_no_files_and_import_no_heavy_package() -> None:
    for module in RULES:
        tree = ast.parse(inspect.getsource(typing.cast("typing.Any", module)))
        roots = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").split(".")[0])
        assert roots <= {"__future__", "collections", "gpudoctor", "re", "dataclasses", "itertools", "statistics"}, (
            module.RULE.code
        )


def test_two_ranks_of_one_line_are_one_finding() -> None:
    example = next(e for e in rules.find_rule("SYN001").EXAMPLES if e.kind == "fires")
    assert example.case.watched is not None
    first = example.case.watched.records[0]
    slower = dataclasses.replace(first, pid=2, rank=1, steps=(Step(wall_ms=10),) * len(first.steps))
    watched = Watched(command=("torchrun",), cwd="", records=(first, slower))
    report = rules.run_rules(Case(watched=watched), select=["SYN001"])
    assert [finding.subject for finding in report.findings] == ["train.py:88"]
    assert "50 %" in report.findings[0].message


def test_width_and_speed_share_one_low_copy_rate() -> None:
    """Root causes swallow their fallout: the low measurement is a symptom of the first finding only."""
    gpu = Gpu(
        index=0,
        pcie=dataclasses.replace(
            rules.find_rule("PCI001").EXAMPLES[0].case.gpus[0].pcie,  # type: ignore[type-var]
            generation=3,
            max_generation=4,
            port_max_generation=4,
        ),
    )
    expected = profiles.expected_copy(gpu, "h2d")
    slow = Measurement(metric="h2d", subject="gpu:0", value=3.1, unit="GB/s", expected=expected, verdict="bad")
    report = rules.run_rules(Case(gpus=(gpu,), measurements=(slow,)), select=["PCI"])
    by_code = {finding.rule: finding for finding in report.findings}
    assert set(by_code) == {"PCI001", "PCI002"}
    assert "h2d 3.1 GB/s" in by_code["PCI001"].symptoms[0]
    assert by_code["PCI001"].gain is not None
    assert by_code["PCI002"].symptoms == ("the same cost as in PCI001 at gpu:0",)
    assert by_code["PCI002"].gain is None


def test_pinning_and_the_copy_it_speeds_up_count_once() -> None:
    case = next(e for e in rules.find_rule("LDR003").EXAMPLES if e.kind == "fires").case
    report = rules.run_rules(case, select=["LDR003", "CPY001"])
    assert [finding.rule for finding in report.findings] == ["CPY001", "LDR003"]
    assert [finding.gain is None for finding in report.findings] == [False, True]


def test_subjects_of_fact_paths() -> None:
    case = Case(gpus=(Gpu(index=2, bdf="0000:3b:00.0"),))
    assert evidence.subject_of_path(case, "gpus[0000:3b:00.0].pcie.width") == "gpu:2"
    assert evidence.subject_of_path(case, "gpus[GPU-gone].name") == "gpu:GPU-gone"
    assert evidence.subject_of_path(case, "pairs[gpu:0,nic:mlx5_0].path") == "gpu:0-nic:mlx5_0"
    assert evidence.subject_of_path(case, "nics[mlx5_0].rate_gb_s") == "nic:mlx5_0"
    assert evidence.subject_of_path(case, "host.kernel") == "host"
    assert evidence.cpu_list((8, 0, 1, 2, 10, 11)) == "0-2,8,10-11"


def test_a_lost_gpu_is_not_judged() -> None:
    for module in RULES:
        for example in module.EXAMPLES:
            lost = tuple(dataclasses.replace(gpu, lost=True) for gpu in example.case.gpus)
            found = run(module, dataclasses.replace(example.case, gpus=lost, watched=None, conflicts=())).findings
            assert not [finding for finding in found if finding.subject.startswith("gpu:") and lost]


def test_record_without_time_divides_by_nothing() -> None:
    record = WatchRecord(pid=1, steps=(Step(wall_ms=0.0),))
    report = rules.run_rules(Case(watched=Watched(command=(), cwd="", records=(record,))))
    assert report.errors == ()
