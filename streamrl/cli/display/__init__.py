"""Output that commands share: numbers, generators, status and summary of a run, its live view."""
