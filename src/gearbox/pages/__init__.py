"""Write self-contained HTML pages: the report of a run, and comparisons of runs."""
