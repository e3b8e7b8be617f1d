"""Code that the policy wrote, scored by the unit tests of its row."""
