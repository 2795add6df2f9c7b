"""A loader's settings, in the words of WatchedLoader."""

import sys


def describe(loader):
    data = sys.modules["torch.utils.data"]
    collate = sys.modules["torch.utils.data._utils.collate"]
    dataset = loader.dataset
    iterable = isinstance(dataset, data.IterableDataset)
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    context = getattr(loader, "multiprocessing_context", None)
    start_method = getattr(context, "get_start_method", None)
    return {
        "loader_class": type(loader).__qualname__,
        "dataset_class": type(dataset).__qualname__,
        "iterable_dataset": iterable,
        "sampler_class": None if iterable or sampler is None else type(sampler).__qualname__,
        "dataset_len": None if iterable else _length(dataset),
        "length": None if iterable else _length(loader),  # len() of an iterable loader changes its state
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "shuffle": _shuffle(data, sampler),
        "drop_last": bool(loader.drop_last) if isinstance(getattr(loader, "drop_last", None), bool) else None,
        "num_workers": int(loader.num_workers),
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "in_order": bool(getattr(loader, "in_order", True)),
        "custom_collate": loader.collate_fn not in (collate.default_collate, collate.default_convert),
        "custom_sampler": not iterable and (_foreign(sampler) or _foreign(batch_sampler) or _batches(data, sampler)),
        "generator": getattr(loader, "generator", None) is not None,
        "worker_init_fn": loader.worker_init_fn is not None,
        "multiprocessing_context": str(start_method()) if start_method is not None else None,
    }


def _length(value):
    try:
        return len(value)
    except Exception:
        return None


def _shuffle(data, sampler):
    stateful = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    if isinstance(sampler, data.RandomSampler) or stateful:
        return True
    if isinstance(sampler, data.SequentialSampler):
        return False
    shuffle = getattr(sampler, "shuffle", None)
    return shuffle if isinstance(shuffle, bool) else None


def _foreign(sampler):
    return sampler is not None and not type(sampler).__module__.startswith(("torch.utils.data.", "torchdata."))


def _batches(data, sampler):
    return isinstance(sampler, data.BatchSampler)
