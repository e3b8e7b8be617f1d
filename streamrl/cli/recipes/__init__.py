"""Recipes: complete examples to copy, each a folder with a configuration and a README."""
