"""Many prompts in one run: `imgscale batch`."""
