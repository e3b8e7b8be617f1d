"""The learner: takes trajectory groups, makes optimizer steps, publishes versions."""
