"""The context axis: ranks that hold parts of the same sequences and compute attention together."""
