"""Pure formulas that any room may import."""

from gpudoctor.estimate.link import (
    NVLINK_C2C_GB_S,
    PCIE_GENERATIONS,
    PCIE_WIDTHS,
    nvlink_gb_s,
    pcie_gb_s,
    pcie_generation,
)

__all__ = ["NVLINK_C2C_GB_S", "PCIE_GENERATIONS", "PCIE_WIDTHS", "nvlink_gb_s", "pcie_gb_s", "pcie_generation"]
