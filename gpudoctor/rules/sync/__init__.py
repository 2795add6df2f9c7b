"""Rules about host-device synchronisation."""
