"""Rules about NVLink."""
