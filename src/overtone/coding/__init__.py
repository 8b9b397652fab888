"""The way from tensors to coefficients to bytes: chunks, transform, bit packing, fingerprints. Imports torch only."""
