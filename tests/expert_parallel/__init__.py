"""The expert axis."""
