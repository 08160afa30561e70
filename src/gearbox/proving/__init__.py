"""Train a recipe under several gears, compare their runs, and publish the result as a page and a badge."""
