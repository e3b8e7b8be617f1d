"""What commands print alike: books, generators, numbers, the summary of a run."""
