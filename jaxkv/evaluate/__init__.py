"""How good a model is under a policy."""
