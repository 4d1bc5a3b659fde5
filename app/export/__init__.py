"""The images of a batch run in the layouts that evaluators and other programs read."""
