"""`imgscale bench`: searches compared over prompts, seeds, searchers, budgets, models and verifiers."""
