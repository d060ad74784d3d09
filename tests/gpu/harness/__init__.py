"""Asks a driver what is promised of it, and writes down what was seen. See ../README.md."""
