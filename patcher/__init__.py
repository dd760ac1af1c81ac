"""How hooks reach a model."""
