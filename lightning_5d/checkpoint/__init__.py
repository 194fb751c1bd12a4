"""Checkpoints: the files of a parallel run are those of a one-process run."""
