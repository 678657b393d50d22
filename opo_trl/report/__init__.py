"""Reports on one run folder or several."""
