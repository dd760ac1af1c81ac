"""Speed as ratios, both sides in the same run: `python -m hookline bench`."""
