"""gpudoctor measures a machine with GPUs, names what slows it, and proves what it prescribes."""

__version__ = "0.1.0"
