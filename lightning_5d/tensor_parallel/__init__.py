"""The tensor and sequence axis."""
