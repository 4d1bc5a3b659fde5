"""Measurements: what a search gains and what it costs. Nothing here is a test, and nothing is timed in tests."""
