"""What commands print alike: numbers, generators, status and summary of a run, its live view."""
