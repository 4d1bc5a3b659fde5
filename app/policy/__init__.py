"""`imgscale policy`: what the bandit has learned."""
