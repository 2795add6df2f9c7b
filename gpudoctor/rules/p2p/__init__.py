"""Rules about peer-to-peer."""
