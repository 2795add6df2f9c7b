"""Rules about how a program is started."""
