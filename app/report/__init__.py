"""One HTML page about a batch run."""
