"""Verifiers: each says how good images are for their prompts, as one float32 score an image; one file a family."""
