"""Rules about host-device copies."""
