"""Show a run to its user: the plan, progress lines, metrics, previews, comparisons and the HTML report."""
