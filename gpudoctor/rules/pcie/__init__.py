"""Rules about PCIe link."""
