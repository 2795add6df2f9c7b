"""Rules about DataLoader."""
