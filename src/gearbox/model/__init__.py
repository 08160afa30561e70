"""Load a model as the recipe describes, give it the loss and the optimizer, and save it again."""
