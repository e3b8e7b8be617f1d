"""`streamrl ablate`: what is varied, and the grid of two varied things."""
