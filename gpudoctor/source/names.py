"""What torch and its neighbours do, by name. Sources: PyTorch's documentation, the issues named beside an entry, and a
run of the recorded scripts under set_sync_debug_mode on an H200 with torch 2.11."""

from __future__ import annotations

import functools
import re


class Words:
    """A pattern that is asked about the same few names again and again."""

    def __init__(self, pattern: str) -> None:
        compiled = re.compile(pattern, re.IGNORECASE)
        self.search = functools.lru_cache(maxsize=8192)(lambda text: compiled.search(text) is not None)


# Names of what holds the options of a program.
SETTINGS = frozenset(
    ["args", "cfg", "config", "conf", "opt", "opts", "hparams", "params", "flags", "FLAGS", "settings", "trainer"]
)

# Tensor attributes that are known on the host.
HOST_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_leaf",
        "requires_grad",
        "names",
        "layout",
        "itemsize",
        "nbytes",
        "is_sparse",
        "is_meta",
        "is_quantized",
        "output_nr",
        "version",
        "grad_fn",
        "_version",
        "is_mps",
        "is_nested",
    ]
)
# Tensor methods that answer without the device.
HOST_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_contiguous",
        "storage_offset",
        "data_ptr",
        "ndimension",
        "is_floating_point",
        "get_device",
        "is_complex",
        "is_signed",
        "type_",
        "storage",
        "untyped_storage",
        "is_pinned",
        "is_shared",
        "register_hook",
        "is_inference",
        "has_names",
        "keys",
        "requires_grad_hook",
        "sparse_dim",
        "dense_dim",
    ]
)
# Tensor methods and torch functions whose result is a tensor of bool.
MASKS = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "gt",
        "le",
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "isposinf",
        "isneginf",
        "isreal",
        "isin",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "bool",
        "isclose",
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "not_equal",
        "signbit",
        "any",
        "all",
    ]
)
# Without arguments besides the tensor the result is 0-dim.
REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "max",
        "min",
        "norm",
        "any",
        "all",
        "prod",
        "std",
        "var",
        "argmax",
        "argmin",
        "median",
        "nanmedian",
        "nansum",
        "nanmean",
        "count_nonzero",
        "dot",
        "logsumexp",
        "amax",
        "amin",
        "numel",
        "trace",
        "dist",
        "squeeze_",
        "vdot",
        "det",
        "logdet",
    ]
)
SAME_TENSOR = frozenset(
    [
        "detach",
        "detach_",
        "clone",
        "contiguous",
        "requires_grad_",
        "view",
        "reshape",
        "squeeze",
        "flatten",
        "ravel",
        "unsqueeze",
        "half",
        "float",
        "double",
        "bfloat16",
        "long",
        "int",
        "short",
        "char",
        "byte",
        "expand",
        "expand_as",
        "permute",
        "transpose",
        "t",
        "view_as",
        "reshape_as",
        "retain_grad",
        "cfloat",
    ]
)
# The size of the result depends on the values, so the host waits for it.
DYNAMIC_SHAPE = frozenset(["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"])
# Synchronise by their documentation ("synchronizes that device with the CPU").
LINALG_SYNCS = frozenset(
    [
        "cholesky",
        "eig",
        "eigh",
        "eigvals",
        "eigvalsh",
        "inv",
        "ldl_factor",
        "lu_factor",
        "matrix_rank",
        "pinv",
        "solve",
        "svdvals",
    ]
)
LINALG_WITHOUT = {
    "cholesky": "cholesky_ex",
    "inv": "inv_ex",
    "solve": "solve_ex",
    "lu_factor": "lu_factor_ex",
    "ldl_factor": "ldl_factor_ex",
}

FACTORIES = frozenset(
    [
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "randint",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "randperm",
        "tensor",
        "as_tensor",
        "from_numpy",
        "scalar_tensor",
        "complex",
        "polar",
        "tril_indices",
        "triu_indices",
        "empty_strided",
        "range",
        "asarray",
        "frombuffer",
        "sparse_coo_tensor",
        "hann_window",
    ]
)
FROM_HOST_DATA = frozenset(["tensor", "as_tensor", "asarray", "sparse_coo_tensor"])
LIKE = frozenset(
    [
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
    ]
)
NOT_TENSORS = frozenset(
    [
        "is_tensor",
        "is_floating_point",
        "is_grad_enabled",
        "get_default_dtype",
        "manual_seed",
        "seed",
        "initial_seed",
        "get_rng_state",
        "set_num_threads",
        "get_num_threads",
        "finfo",
        "iinfo",
        "device",
        "dtype",
        "Size",
        "Generator",
        "is_autocast_enabled",
        "get_autocast_gpu_dtype",
        "set_default_dtype",
        "set_float32_matmul_precision",
        "use_deterministic_algorithms",
        "set_printoptions",
        "typename",
        "numel",
        "promote_types",
        "result_type",
        "broadcast_shapes",
        "is_complex",
        "can_cast",
        "is_inference_mode_enabled",
        "set_grad_enabled",
        "set_rng_state",
        "set_num_interop_threads",
        "are_deterministic_algorithms_enabled",
        "get_device_module",
        "compiled_with_cxx11_abi",
        "get_default_device",
        "is_storage",
    ]
)
LOSS_NAMES = re.compile(r"(?:^|_)(?:loss|nll|cross_entropy|binary_cross_entropy(?:_with_logits)?|kl_div)$|_loss$")

MODEL_NAME = Words(
    r"^(?:\w*_)?(?:model|net|network|module|encoder|decoder|backbone|generator|discriminator|critic|actor|policy|unet|vae|"
    r"net[GD]|teacher|student|transformer|classifier|embedder|ddp|engine)\d*(?:_?\w{0,3})?$"
)
LOSS_NAME = Words(r"(?:^|_)(?:loss|criterion|crit|objective|loss_?fn|loss_?func)(?:$|_)|criterion|loss_fn")
LOADER_NAME = Words(
    r"(?:^|_)(?:data_?loader|loader|dataloaders?|train_dl|val_dl|dl|batches|minibatches|train_iter|data_iter)\d*$|loader$"
)
DEVICE_NAME = Words(r"(?:^|[._])(?:dev|device|cuda|gpu|local_rank)\d*(?:$|_)|device$|current_device\(\)$|\brank$")
OPTIMIZER_NAME = Words(r"(?:^|[._])(?:opt|optim|optimizer|optimiser)\w{0,4}$|optim")
NOT_OPTIMIZER = Words(r"sched|prof|env|warm|lr_|\bema\b")
DTYPE_NAME = Words(r"(?:^|[._])(?:dtype|float\d*|half|bfloat16|double|int\d*|uint8|long|bool|complex\d*)$|dtype")
DEBUG_NAME = Words(r"debug|verbose|profil|trace|sanity|dry_?run|benchmark|visuali[sz]e")
RARE_NAME = Words(
    r"should_|(?:^|[._])(?:log|print|save|eval|report|display|checkpoint|ckpt|vis|sample|plot)(?:_now|_this|_step)|_every|every_|"
    r"interval|is_last|is_first|last_step|first_step|(?:^|[._])(?:do|to|need)_(?:log|print|save|eval|report)|log_freq|print_freq|"
    r"logging_steps|is_log|is_save|is_eval|is_print|"
    r"(?:^|[._])(?:done|terminal|terminated|truncated|(?:episode|epoch)_(?:end|done|over))$"
)
# Accelerators that are no CUDA devices: what runs only there says nothing about a GPU.
OTHER_DEVICE = Words(
    r"(?:^|[._])is_(?:torch_)?(?:xla|tpu|npu|xpu|mlu|hpu|musa|sdaa|neuron|neuroncore|mps)_available$|"
    r"(?:^|\.)(?:xla|tpu|npu|xpu|mlu|hpu|musa|sdaa|neuron|mps)\.is_available$"
)
OTHER_DEVICE_TYPE = Words(r"(?:^|[._:])(?:xla|tpu|npu|xpu|mlu|hpu|musa|sdaa|neuron|mps)(?:$|:)")
COUNTER_NAME = Words(
    r"(?:^|[._])(?:step|steps|global_step|it|iter|iteration|idx|batch_idx|i|n|n_iter|batch|epoch|count|counter|t)(?:$|_)"
)
TIMING_NAME = Words(
    r"(?:^|_)(?:bench|benchmark|timeit|time_\w+|timing|measure|profile|profiling|latency|throughput|speed_?test)"
)
WARM_UP_NAME = Words(r"warm_?up")
# Set-up and reporting that is no step, by the names people give to functions.
EVALUATION_NAME = Words(
    r"(?:^|_)(?:eval|evaluate|evaluation|validate|validation|valid|val|test|testing|infer_and_eval|sanity_check|inspect|visualize)(?:$|_)"
)
ACCUMULATION_NAME = Words(r"accum")

# Methods that a framework calls for each batch, by (last name of a base, method).
LIGHTNING_BASES = ("LightningModule", "LightningDataModule")
LIGHTNING_HOOKS = frozenset(
    [
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_after_backward",
        "on_before_zero_grad",
        "on_before_backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "training_step_end",
        "backward",
    ]
)
LIGHTNING_CALLBACK_HOOKS = frozenset(
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_after_backward",
        "on_before_zero_grad",
        "on_before_backward",
    ]
)
TRAINER_BASES = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer")
TRAINER_HOOKS = frozenset(["compute_loss", "training_step"])
TRAINER_CALLBACK_HOOKS = frozenset(
    ["on_step_begin", "on_step_end", "on_substep_end", "on_optimizer_step", "on_pre_optimizer_step"]
)

LOGGER_METHODS = frozenset(["debug", "info", "warning", "error", "critical", "log", "exception", "warn"])
PROGRESS_METHODS = frozenset(["set_postfix", "set_postfix_str", "set_description", "set_description_str"])
SCALAR_LOGGERS = frozenset(["add_scalar", "add_scalars", "add_histogram", "log_metric", "log_metrics", "log_scalar"])

# torchmetrics classes that look for NaN on the host at each update, unless told otherwise (torchmetrics#2943).
NAN_METRICS = frozenset(["MeanMetric", "SumMetric", "MaxMetric", "MinMetric", "CatMetric", "RunningMean", "RunningSum"])

# Datasets whose samples are decoded from files.
COSTLY_DATASETS = re.compile(
    r"(?:^|\.)(?:ImageFolder|DatasetFolder|ImageNet|CocoDetection|CocoCaptions|VOCDetection|VOCSegmentation|Kinetics|UCF101|Places365|CelebA|Cityscapes)$"
)
