"""What is written of a learner, when, and how it goes on from it."""
