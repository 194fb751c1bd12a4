"""Five-dimensional parallel training for PyTorch Lightning: `Trainer(strategy=FiveD(...))`."""
