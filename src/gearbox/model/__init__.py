"""From a recipe to a model, and back to a folder."""
