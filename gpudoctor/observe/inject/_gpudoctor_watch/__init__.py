"""The part of gpudoctor that lives inside the user's process: standard library only, Python 3.9 and later.

It reads a WatchPlan (JSON), hooks what torch defines once torch has been imported by the user's own code, and
writes a WatchRecord (JSON). It never raises into user code: a failure of ours becomes a note in the record.

`imports` waits for modules and supplies patched text, `steps` counts, `loaders` times, `calls` sees copies and
synchronisation, `ranks` what ranks wait for each other, `proof` hashes, `writes` guards files, `record` writes;
`state` is what they share.
"""


def start(plan_path):
    """Called once, by sitecustomize, before the user's first line."""
    from _gpudoctor_watch import imports, record, state, steps, writes

    plan = state.load_plan(plan_path)
    state.begin(plan)
    record.register()
    imports.install(plan)
    imports.after("torch", steps.install)
    imports.after("torch.utils.data.dataloader", _loaders)
    imports.after("torchdata.stateful_dataloader.stateful_dataloader", _stateful_loaders)
    imports.after("torch._dynamo.trace_rules", steps.keep_out_of_graphs)
    if plan["watch_calls"]:
        imports.after("torch", _calls)
    if plan["watch_ranks"]:
        imports.after("torch.distributed", _collectives)
        imports.after("torch.nn.parallel.distributed", _ddp)
    if plan["proof"] is not None:
        imports.after("numpy", _seed_numpy)
        imports.after("torch", _seed_torch)
        _seed_random()
    if plan["guard_writes"] != "off":
        writes.install(plan)
        imports.after("torch", writes.hook_torch)
        imports.after("safetensors", writes.hook_safetensors)


def _loaders(module):
    from _gpudoctor_watch import loaders

    loaders.install(module)


def _stateful_loaders(module):
    from _gpudoctor_watch import loaders

    loaders.install_stateful(module)


def _calls(module):
    from _gpudoctor_watch import calls

    calls.install(module)


def _collectives(module):
    from _gpudoctor_watch import ranks

    ranks.install_collectives(module)


def _ddp(module):
    from _gpudoctor_watch import ranks

    ranks.install_ddp(module)


def _seed_random():
    from _gpudoctor_watch import proof

    proof.seed_random()


def _seed_numpy(module):
    from _gpudoctor_watch import proof

    proof.seed_numpy(module)


def _seed_torch(module):
    from _gpudoctor_watch import proof

    proof.seed_torch(module)
